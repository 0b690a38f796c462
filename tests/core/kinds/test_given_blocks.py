"""Blocks that each call gives: what they may be, that nothing is kept of them, and who does not take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import BlockSparse, Pattern, SlidingWindow, dilated_attention, plan
from dilkit.sparse import top_k_blocks

GIVEN = Pattern.of(BlockSparse(None, 8))
SEQ, HEADS, BLOCKS = 29, 4, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K = normal(2, SEQ, HEADS, 8), normal(2, SEQ, 2, 8, seed=1)


def attend(layout: Any, pattern: Pattern = GIVEN, **options: Any) -> Any:
    return dilated_attention(Q, K, K, pattern, block_layout=layout, **options)


def test_values_and_text() -> None:
    pattern = Pattern.of(BlockSparse(None, 8, heads=(0, 2)), SlidingWindow(3))
    assert Pattern.from_json(pattern.to_json()) == pattern
    assert str(GIVEN) == "Pattern.of(BlockSparse(None, 8))"
    assert GIVEN.flops(SEQ, 1, 1) == 4 * SEQ**2  # at most


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_layout_by_head_is_of_the_heads_at_hand(backend: str) -> None:
    layout = torch.rand(1, HEADS, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(2)) < 0.5
    part = Pattern.of(BlockSparse(None, 8), head_shard=(1, 4))
    assert torch.equal(attend(layout, part, backend=backend), attend(layout, backend=backend))


def test_nothing_is_kept_of_what_blocks_see() -> None:
    layouts = torch.rand(20, 1, 1, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.5
    attend(layouts[0], backend="native")
    before = plan.cache_info().entries
    results = [attend(layout, backend="native") for layout in layouts]
    assert plan.cache_info().entries == before
    assert len({out.sum().item() for out in results}) > 10


def test_numbers_are_the_bools_that_they_name() -> None:
    chosen = top_k_blocks(Q, K, 8, 2)
    bools = torch.zeros(2, HEADS, BLOCKS, BLOCKS, dtype=torch.bool)
    bools.scatter_(-1, chosen.repeat_interleave(2, 1), True)
    torch.testing.assert_close(attend(chosen), attend(bools))
    torch.testing.assert_close(attend(chosen.int()), attend(bools))


def test_gradients_and_compiled_calls() -> None:
    leaves = [x[:1, :11, :, :2].clone().requires_grad_() for x in (Q, K)]
    chosen = torch.tensor([[[[0], [1]], [[1], [-1]]]])

    def loss(q, k):
        out = dilated_attention(q, k, k, GIVEN, block_layout=chosen, backend="reference")
        assert isinstance(out, Tensor)
        return out.square().sum()

    assert torch.autograd.gradcheck(loss, leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("is_causal", [False, True])
def test_top_k_blocks_are_those_of_the_definition(is_causal: bool) -> None:
    chosen = top_k_blocks(Q, K, 8, 3, is_causal=is_causal)
    assert chosen.shape == (2, 2, BLOCKS, 3)
    for b in range(2):
        for group in range(2):
            for row in range(BLOCKS):
                queries = Q[b, 8 * row : 8 * row + 8, 2 * group : 2 * group + 2].mean((0, 1))
                scores = {c: float(queries @ K[b, 8 * c : 8 * c + 8, group].mean(0)) for c in range(BLOCKS)}
                others = sorted((c for c in scores if c != row and not (is_causal and c > row)), key=lambda c: -scores[c])
                expected = [row, *others][:3]
                assert chosen[b, group, row].tolist() == expected + [-1] * (3 - len(expected))


@pytest.mark.parametrize("size", [1e20, -1e20, torch.inf, torch.nan])
def test_the_own_block_is_chosen_whatever_its_score(size: float) -> None:
    query, key = torch.full((1, 20, 2, 4), 1e20), torch.full((1, 20, 2, 4), size)
    assert top_k_blocks(query, key, 5, 1)[0].tolist() == [[[0], [1], [2], [3]]] * 2
    key[:, 5:10] = 1.0
    chosen = top_k_blocks(query, key, 5, 3, is_causal=True)[0, 0]
    assert chosen[:, 0].tolist() == [0, 1, 2, 3]
    assert chosen.sort().values[:3].tolist() == [[-1, -1, 0], [-1, 0, 1], [0, 1, 2]]


def test_top_k_blocks_takes_no_more_than_there_are() -> None:
    assert top_k_blocks(Q, K, 8, 100).sort(-1).values.equal(torch.arange(BLOCKS).expand(2, 2, BLOCKS, BLOCKS))
    assert top_k_blocks(Q.half(), K.half(), 100, 1).tolist() == [[[[0]], [[0]]], [[[0]], [[0]]]]


def test_top_k_blocks_compiled_in_one_graph() -> None:
    def call(query, key):
        chosen = top_k_blocks(query, key, 8, 2, is_causal=True)
        return dilated_attention(query, key, key, GIVEN, block_layout=chosen, is_causal=True)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(Q, K), call(Q, K))
