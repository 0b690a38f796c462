"""What an exchange plan says of the rows that a rank holds, and of itself."""

from __future__ import annotations

import pytest

from dilkit import BlockSparse, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.comm import ExchangePlan, Rows, shard_cuts
from dilkit.comm.passes.ring.segment import ring_segments
from dilkit.comm.plan.buffer_bytes import ring_buffer_bytes
from dilkit.comm.plan.exchange_plan import PHASES


@pytest.mark.parametrize("is_causal", [False, True])
def test_ring_buffers_are_four_blocks(is_causal: bool) -> None:
    plan = ExchangePlan(Pattern([10, 70], [2, 3]), shard_cuts(70, 4), 4, 2, is_causal, "ring")
    found = ring_buffer_bytes(plan, Rows(8, "float32", 2, key_padding_mask=True))
    for rank in range(4):
        blocks = [
            sum(max(c.key_rows(i) for i in range(c.size)) for c in ring_segments(plan, branch, rank, 2)) for branch in range(2)
        ]
        assert found[rank] == 4 * max(blocks) * (2 * 8 * 4 + 1)


def test_plans_explain_themselves() -> None:
    plan = ExchangePlan(Pattern([16, 64, 128], [1, 2, 4]), shard_cuts(128, 4), 8, 8)
    first, second, third = plan.explain(Rows(8, "bfloat16")).splitlines()
    assert first == "branch 0: segments of 16, rate 1: local: every segment is within one rank: nothing is sent"
    assert second.startswith("branch 1: segments of 64, rate 2: scatter over 2 ranks: ")
    assert "scatter 256, gather 256" in second
    sent = [int(plan.traffic(phase, Rows(8, "bfloat16"), 2).sent.max()) for phase in PHASES]
    assert f"sends {sent[0]:,} bytes forward, {sent[1]:,} backward" in third
    assert "scatter moves the fewest rows" in third
    kinds = SlidingWindow(9), GlobalTokens(4), BlockSparse.local_global(16, 8), Strided(8), SlidingWindow(1)
    plan = ExchangePlan(Pattern.of(*kinds), shard_cuts(128, 4), 8, 8)
    window, tokens, blocks, stride, nothing = plan.explain(Rows(8, "bfloat16")).splitlines()
    assert window.startswith(
        "branch 0: a window of 9 tokens: halo over 4 ranks: each rank is sent the keys and values within reach"
    )
    assert window.endswith("the rank that sends most sends 4,096 bytes forward, 4,096 backward (bfloat16)")  # 8 rows to each side
    assert tokens.startswith(
        "branch 1: the first 4 tokens, seen by all, and seeing all: broadcast over 4 ranks: keys and values of"
    )
    assert ": blocks over 4 ranks: each rank is sent the blocks of keys and values that its own queries see" in blocks
    assert "the whole sequence, counted from each query: scatter over 4 ranks" in stride
    assert nothing.endswith("local: no rank needs rows of another: nothing is sent")
    text = ExchangePlan(Pattern([128], [4]), shard_cuts(128, 4), 8, 8, schedule="ring").explain()
    assert "ring over 4 ranks" in text
    assert "as schedule='ring' says" in text
