"""Fixtures that tests of measuring share."""

import functools
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from helpers.cuda_clock import FakeCuda
from helpers.measuring import shrink

from dilkit.threads import torch_threads


@pytest.fixture(scope="session", autouse=True)
def _state_asked_once() -> Iterator[None]:
    """Ask git once for the facts of the checkout in every result: two processes of git do for three hundred."""
    from dilkit.tools.results import environment

    with mock.patch.object(environment, "git_state", functools.cache(environment.git_state)):
        yield


@pytest.fixture
def without_pictures(monkeypatch):
    """For tests that do not look at them: they are most of the time."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def tiny_yardsticks(monkeypatch) -> Iterator[None]:
    shrink(monkeypatch)
    with torch_threads(1):
        yield


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)
