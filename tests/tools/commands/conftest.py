"""A backend that several commands judge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.fakes import Picky, registered


@pytest.fixture
def picky() -> Iterator[str]:
    with registered(Picky()) as name:
        yield name
