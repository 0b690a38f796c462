"""Blocks that each call gives: what they may be, that nothing is kept of them, and who does not take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilkit import (
    BlockSparse,
    DilatedAttention,
    DilatedCache,
    Pattern,
    PatternError,
    SlidingWindow,
    attention_rows,
    dilated_attention,
    dilated_attention_varlen,
    dilated_attention_with_kvcache,
    order,
    ordered_dilated_attention,
    plan,
)
from dilkit.comm import ring_dilated_attention, run_threads
from dilkit.sparse import top_k_blocks

GIVEN = Pattern.of(BlockSparse(None, 8))
SEQ, HEADS, BLOCKS = 29, 4, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K = normal(2, SEQ, HEADS, 8), normal(2, SEQ, 2, 8, seed=1)
ALL = torch.ones(1, 1, BLOCKS, BLOCKS, dtype=torch.bool)
OWN = torch.arange(BLOCKS).view(1, 1, BLOCKS, 1)


def attend(layout: Any, pattern: Pattern = GIVEN, **options: Any) -> Any:
    return dilated_attention(Q, K, K, pattern, block_layout=layout, **options)


def test_values_and_text() -> None:
    pattern = Pattern.of(BlockSparse(None, 8, heads=(0, 2)), SlidingWindow(3))
    assert Pattern.from_json(pattern.to_json()) == pattern
    assert str(GIVEN) == "Pattern.of(BlockSparse(None, 8))"
    assert GIVEN.flops(SEQ, 1, 1) == 4 * SEQ**2  # at most
    with pytest.raises(PatternError, match=r"BlockSparse\(None, 8\) has no layout of its own.*block_layout="):
        GIVEN.count(SEQ, HEADS)
    with pytest.raises(PatternError, match="two without a layout of their own"):
        Pattern.of(BlockSparse(None, 8), BlockSparse(None, 16))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_layout_by_head_is_of_the_heads_at_hand(backend: str) -> None:
    layout = torch.rand(1, HEADS, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(2)) < 0.5
    part = Pattern.of(BlockSparse(None, 8), head_shard=(1, 4))
    assert torch.equal(attend(layout, part, backend=backend), attend(layout, backend=backend))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "missing": (lambda: attend(None), ValueError, "block_layout is missing"),
    "not asked for": (lambda: attend(ALL, Pattern.dense()), ValueError, r"no branch for it.*BlockSparse\(None"),
    "an array": (lambda: attend([[True]]), TypeError, "block_layout is a list"),
    "floats": (lambda: attend(ALL.float()), TypeError, "float32; torch.bool, True = seen"),
    "another batch": (lambda: attend(ALL.expand(3, -1, -1, -1)), ValueError, r"\(3, 1, 4, 4\); \(2 or 1, 4 or 1, 4, 4\)"),
    "other heads": (lambda: attend(ALL.expand(-1, 2, -1, -1)), ValueError, r"\(1, 2, 4, 4\)"),
    "numbers by query head": (lambda: attend(OWN.expand(-1, 4, -1, -1)), ValueError, r"\(1, 4, 4, 1\); \(2 or 1, 2 or 1, 4, k\)"),
    "fewer blocks": (lambda: attend(ALL[:, :, :3, :3]), ValueError, "seq=29 tokens are 4 blocks of 8"),
    "more columns": (lambda: attend(ALL.repeat(1, 1, 1, 2)), ValueError, r"\(1, 1, 4, 8\)"),
    "out of range": (lambda: attend(OWN + 1), ValueError, "numbers from 1 to 4; those of blocks, 0 to 3, or -1"),
    "below -1": (lambda: attend(OWN - 2), ValueError, "numbers from -2 to 1"),
    "twice": (lambda: attend(torch.tensor([0, 3, 0]).expand(1, 1, BLOCKS, -1)), ValueError, "a block twice"),
    "after its query": (lambda: attend(OWN.flip(2), is_causal=True), ValueError, "a block after its query block"),
    "elsewhere": (lambda: attend(ALL.to("meta")), ValueError, "block_layout is on meta but query on cpu"),
    "sparse": (lambda: attend(ALL.to_sparse()), TypeError, "plain tensor"),
    "packed": (
        lambda: dilated_attention_varlen(Q[0], K[0], K[0], GIVEN, torch.tensor([0, SEQ], dtype=torch.int32)),
        ValueError,
        "block_layout is missing",
    ),
    "cached": (
        lambda: dilated_attention_with_kvcache(
            Q[:, :1], K.clone(), K.clone(), GIVEN, cache_seqlens=torch.full((2,), 8, dtype=torch.int32)
        ),
        ValueError,
        "block_layout is missing",
    ),
    "a cache": (lambda: DilatedCache(GIVEN, 2), PatternError, "chosen by each call"),
    "along an order": (lambda: ordered_dilated_attention(Q, K, K, GIVEN, order((SEQ, 1), "snake")), ValueError, "missing"),
    "weights": (lambda: attention_rows(Q, K, GIVEN, [0]), ValueError, "no layout of its own"),
    "a module": (lambda: DilatedAttention(GIVEN)(Q, K, K), ValueError, "block_layout is missing"),
    "over ranks": (
        lambda: run_threads(1, lambda comm: ring_dilated_attention(Q, K, K, GIVEN, comm)),
        ValueError,
        "no layout of its own|block_layout",
    ),
    "mapped": (lambda: torch.vmap(lambda q: dilated_attention(q, K, K, GIVEN, block_layout=ALL))(Q[None]), RuntimeError, "vmap"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


def test_nothing_is_kept_of_what_blocks_see() -> None:
    layouts = torch.rand(20, 1, 1, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.5
    backend = "native" if _is_built() else None
    if backend is None:
        pytest.skip("the CPU kernel was not built: a pattern is made for each layout")
    attend(layouts[0], backend=backend)
    before = plan.cache_info().entries
    results = [attend(layout, backend=backend) for layout in layouts]
    assert plan.cache_info().entries == before
    assert len({out.sum().item() for out in results}) > 10


def _is_built() -> bool:
    from dilkit.backends.native.backend import is_built

    return is_built()


def test_numbers_are_the_bools_that_they_name() -> None:
    chosen = top_k_blocks(Q, K, 8, 2)
    bools = torch.zeros(2, HEADS, BLOCKS, BLOCKS, dtype=torch.bool)
    bools.scatter_(-1, chosen.repeat_interleave(2, 1), True)
    torch.testing.assert_close(attend(chosen), attend(bools))
    torch.testing.assert_close(attend(chosen.int()), attend(bools))


def test_gradients_and_compiled_calls() -> None:
    leaves = [x[:1, :11, :, :2].clone().requires_grad_() for x in (Q, K)]
    chosen = torch.tensor([[[[0], [1]], [[1], [-1]]]])

    def loss(q: Tensor, k: Tensor) -> Tensor:
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
    """Scores that overflow, and blocks of which the score is no number."""
    query, key = torch.full((1, 20, 2, 4), 1e20), torch.full((1, 20, 2, 4), size)
    assert top_k_blocks(query, key, 5, 1)[0].tolist() == [[[0], [1], [2], [3]]] * 2
    key[:, 5:10] = 1.0
    chosen = top_k_blocks(query, key, 5, 3, is_causal=True)[0, 0]
    assert chosen[:, 0].tolist() == [0, 1, 2, 3]
    assert chosen.sort().values[:3].tolist() == [[-1, -1, 0], [-1, 0, 1], [0, 1, 2]]


def test_top_k_blocks_takes_no_more_than_there_are() -> None:
    assert top_k_blocks(Q, K, 8, 100).sort(-1).values.equal(torch.arange(BLOCKS).expand(2, 2, BLOCKS, BLOCKS))
    assert top_k_blocks(Q.half(), K.half(), 100, 1).tolist() == [[[[0]], [[0]]], [[[0]], [[0]]]]
    for wrong in (dict(k=0), dict(block_size=0)):
        with pytest.raises(ValueError, match="at least 1"):
            top_k_blocks(Q, K, **{**dict(block_size=8, k=1), **wrong})
    with pytest.raises(ValueError, match="key"):
        top_k_blocks(Q, K[:, :9], 8, 1)


def test_top_k_blocks_compiled_in_one_graph() -> None:
    def call(query: Tensor, key: Tensor) -> Tensor:
        chosen = top_k_blocks(query, key, 8, 2, is_causal=True)
        return dilated_attention(query, key, key, GIVEN, block_layout=chosen, is_causal=True)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(Q, K), call(Q, K))
