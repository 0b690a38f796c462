"""What tests of measuring share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.yardsticks import shrink

from dilkit.threads import torch_threads


@pytest.fixture
def tiny_yardsticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yardsticks that take no time, and one thread: on tiny problems more only wait for each other."""
    shrink(monkeypatch)
    with torch_threads(1):
        yield
