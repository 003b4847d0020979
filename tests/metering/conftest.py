"""What is made once for many tests: the kernels as a CPU library, and a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evap.metering import build
from tests.metering.postgres import Postgres, database


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if build.host_compiler() is None:
        pytest.skip("no C++ compiler: the kernels' host build cannot be made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVAP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "kernels"))
        return build.host_library()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A server of its own for a file of tests; they are skipped where there is no PostgreSQL."""
    pytest.importorskip("asyncpg", reason="needs asyncpg (the postgres extra)")
    with database() as it:
        if it is None:
            pytest.skip("needs PostgreSQL's initdb and postgres (apt install postgresql)")
        yield it
