"""Modules with their heads over ranks, as torch's tensor parallelism divides them: what one rank finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import launch


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_over_ranks_are_those_of_one(ranks: int, tmp_path: Path) -> None:
    job = launch.start("gloo", ranks, tmp_path, "head_parallel_rank.py", str(tmp_path)).finish()
    assert job.code == 0, job
    assert job.text.count("is right") == ranks, job
