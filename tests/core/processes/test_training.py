"""Long training, and training in several processes that have whole sequences each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import launch


@pytest.mark.slow
def test_ddp_and_fsdp_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP")
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    job = launch.start("gloo", 2, tmp_path, "data_parallel_rank.py", str(tmp_path)).finish()
    assert job.code == 0, job
    assert job.text.count("is right") == 2, job
