"""Long training, and training in several processes that have whole sequences each."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from helpers import launch

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern

MIB = 2**20


@pytest.mark.slow
def test_ddp_and_fsdp_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP")
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    job = launch.start("gloo", 2, tmp_path, "data_parallel_rank.py", str(tmp_path)).finish()
    assert job.code == 0, job
    assert job.text.count("is right") == 2, job


@pytest.mark.slow
def test_10000_steps_leave_nothing_behind() -> None:
    """Of sequences of 64 lengths; 0.5 MiB were measured over the last 9,000."""
    attention = MultiheadDilatedAttention(32, 4, DilatedAttention(Pattern([16, 64], [1, 4])), is_causal=True, rotary=True)
    optimizer = torch.optim.AdamW(attention.parameters(), 1e-3)
    held = []
    for step in range(10_000):
        optimizer.zero_grad()
        attention(torch.randn(2, 64 + step % 64, 32))[0].square().mean().backward()
        optimizer.step()
        if step % 1000 == 999:
            gc.collect()
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert held[-1] - held[0] < 8 * MIB
