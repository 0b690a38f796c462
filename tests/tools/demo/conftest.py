"""What tests of the demos share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    """--threads is for the whole process: put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
