"""Attention over ranks under torch.compile, on two ranks: the results, the messages and the errors of plain calls."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers import launch

COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="Inductor needs a C++ compiler at run time")


@pytest.mark.parametrize(
    "name",
    [
        "essentials",
        pytest.param("refused", marks=pytest.mark.slow),
        pytest.param("further", marks=pytest.mark.slow),
        pytest.param("essentials_on_inductor", marks=[pytest.mark.slow, NEEDS_COMPILER]),
        pytest.param("further_on_inductor", marks=[pytest.mark.slow, NEEDS_COMPILER]),
    ],
)
def test_two_ranks(tmp_path: Path, name: str) -> None:
    """The names are those of functions in `helpers/compiled_rank.py`."""
    job = launch.start("gloo", 2, tmp_path, "compiled_rank.py", name).finish(280)
    assert job.code == 0, job
    assert job.text.count("is right") == 2, job
