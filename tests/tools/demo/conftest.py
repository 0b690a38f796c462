"""Fixtures that tests of the demos share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    """--threads is for the whole process: put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> str:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(12):
        (folder / f"file{i}.txt").write_text("".join(f"line {j} of file {i}: {i * j}\n" for j in range(40)))
    return str(folder)
