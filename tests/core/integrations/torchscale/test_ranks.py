"""`seq_parallel`: each rank of torchscale's process group has a part of the sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import launch
from helpers.torchscale_peer import PEERS


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_two_ranks_compute_the_whole(peer: str, tmp_path: Path) -> None:
    job = launch.start("gloo", 2, tmp_path, "torchscale_rank.py", peer).finish()
    assert job.code == 0, job
    assert all(f"rank {rank} is right" in job.text for rank in range(2)), job
