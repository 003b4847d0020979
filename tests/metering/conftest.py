"""The kernels as a CPU library, built once a session into a directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from evap.metering import build


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if build.host_compiler() is None:
        pytest.skip("no C++ compiler: the kernels' host build cannot be made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVAP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))
        return build.host_library()
