"""What tests of the core share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module")
def little_to_look_through() -> None:
    """Memory is measured after a collection of garbage, which what other tests have imported would slow down tenfold."""
    gc.collect()
    gc.freeze()
