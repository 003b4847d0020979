"""Tiny models with random weights, made with transformers once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.torch.tiny import Maker


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads that wait for each other, least of all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    return Maker(tmp_path_factory)
