"""`seq_parallel`: each rank of torchscale's process group has a part of the sequence."""

from __future__ import annotations

from pathlib import Path

from helpers import launch


def test_two_ranks_compute_the_whole(tmp_path: Path) -> None:
    job = launch.start("gloo", 2, tmp_path, "torchscale_rank.py").finish()
    assert job.code == 0, job
    assert all(f"rank {rank} is right" in job.text for rank in range(2)), job
