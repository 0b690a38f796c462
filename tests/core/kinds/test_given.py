"""Blocks and intervals that each call gives."""

import pytest
import torch

from dilkit import BlockSparse, Intervals, Pattern, SlidingWindow, dilated_attention, plan
from dilkit.sparse import intervals_of_mask, top_k_blocks
from dilkit.testing.tensors import random_intervals

GIVEN, BY_ROW = Pattern.of(BlockSparse(None, 8)), Pattern.of(Intervals(None, most=3))
SEQ, HEADS, BLOCKS = 29, 4, 4


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K = normal(2, SEQ, HEADS, 8), normal(2, SEQ, 2, 8, seed=1)


def attend(layout, pattern=GIVEN, **options):
    return dilated_attention(Q, K, K, pattern, block_layout=layout, **options)


def drawn(*shape, seed=0):
    batch, heads, most = shape
    return random_intervals((batch, heads, SEQ, most), torch.Generator().manual_seed(seed), torch.device("cpu"))


def shown_by(intervals):
    """Return the mask that intervals stand for, pair by pair."""
    mask = torch.zeros(*intervals.shape[:3], intervals.shape[2], dtype=torch.bool)
    for batch, head, row, number in torch.cartesian_prod(*map(torch.arange, intervals.shape[:4])).tolist():
        begin, end = intervals[batch, head, row, number].tolist()
        mask[batch, head, row, begin:end] = True
    return mask


@pytest.mark.parametrize("branch", [BlockSparse(None, 8, heads=(0, 2)), Intervals(None, most=2, heads=(1, 3))], ids=str)
def test_values_and_text(branch):
    pattern = Pattern.of(branch, SlidingWindow(3))
    assert Pattern.from_json(pattern.to_json()) == pattern == eval(str(pattern))
    assert str(GIVEN) == "Pattern.of(BlockSparse(None, 8))"
    assert str(BY_ROW) == "Pattern.of(Intervals(None, most=3))"
    assert GIVEN.flops(SEQ, 1, 1) == BY_ROW.flops(SEQ, 1, 1) == 4 * SEQ**2  # at most


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_intervals_are_those_of_a_mask(backend, is_causal):
    """The mask is one that torch's own attention takes, and has these runs."""
    for seed, (batch, heads) in enumerate([(1, 1), (2, 1), (1, HEADS), (2, HEADS)]):
        intervals = drawn(batch, heads, 3, seed=seed)
        mask = shown_by(intervals)
        assert torch.equal(shown_by(intervals_of_mask(mask, most=5)), mask)
        mask = mask.tril() if is_causal else mask
        q, k = Q.transpose(1, 2), K.transpose(1, 2)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
        expected = expected.masked_fill(~mask.any(-1, keepdim=True), 0.0).transpose(1, 2)
        options = dict(intervals=intervals, is_causal=is_causal, backend=backend, return_lse=True)
        out, lse = dilated_attention(Q, K, K, BY_ROW, **options)
        torch.testing.assert_close(out, expected)
        assert torch.equal(lse == -torch.inf, ~mask.any(-1).expand(2, HEADS, -1))


def test_intervals_compiled_exported_and_in_lower_precision():
    class Layer(torch.nn.Module):
        def forward(self, query, key, intervals):
            return dilated_attention(query, key, key, BY_ROW, intervals=intervals, is_causal=True)

    arguments = Q.float(), K.float(), drawn(1, HEADS, 3)
    expected = Layer()(*arguments)
    assert torch.equal(torch.compile(Layer(), fullgraph=True, backend="aot_eager")(*arguments), expected)
    assert torch.equal(torch.export.export(Layer(), arguments).module()(*arguments), expected)
    assert Layer()(*(x.to("meta") for x in arguments)).shape == expected.shape
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(Layer()(*arguments).float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_layout_by_head_is_of_the_heads_at_hand(backend):
    layout = torch.rand(1, HEADS, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(2)) < 0.5
    part = Pattern.of(BlockSparse(None, 8), head_shard=(1, 4))
    assert torch.equal(attend(layout, part, backend=backend), attend(layout, backend=backend))


def test_nothing_is_kept_of_what_blocks_see():
    layouts = torch.rand(20, 1, 1, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.5
    attend(layouts[0], backend="native")
    dilated_attention(Q, K, K, BY_ROW, intervals=drawn(1, 1, 3), backend="native")
    before = plan.cache_info().entries
    results = [attend(layout, backend="native") for layout in layouts]
    results += [dilated_attention(Q, K, K, BY_ROW, intervals=drawn(1, 1, 3, seed=i), backend="native") for i in range(20)]
    assert plan.cache_info().entries == before
    assert len({out.sum().item() for out in results}) > 20


def test_numbers_are_the_bools_that_they_name():
    chosen = top_k_blocks(Q, K, 8, 2)
    bools = torch.zeros(2, HEADS, BLOCKS, BLOCKS, dtype=torch.bool)
    bools.scatter_(-1, chosen.repeat_interleave(2, 1), True)
    torch.testing.assert_close(attend(chosen), attend(bools))
    torch.testing.assert_close(attend(chosen.int()), attend(bools))


def test_gradients_and_compiled_calls():
    leaves = [x[:1, :11, :, :2].clone().requires_grad_() for x in (Q, K)]
    chosen = torch.tensor([[[[0], [1]], [[1], [-1]]]])

    def loss(q, k):
        out = dilated_attention(q, k, k, GIVEN, block_layout=chosen, backend="reference")
        return out.square().sum()

    assert torch.autograd.gradcheck(loss, leaves)
    intervals = torch.tensor([[[[[0, 1], [2, 3 + i], [9, 11]] for i in range(5)] + [[[0, 0]] * 3] * 6]]).int()
    of_rows = lambda q, k: dilated_attention(q, k, k, BY_ROW, intervals=intervals, backend="native")  # noqa: E731
    assert torch.autograd.gradcheck(of_rows, leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("is_causal", [False, True])
def test_top_k_blocks_are_those_of_the_definition(is_causal):
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
def test_the_own_block_is_chosen_whatever_its_score(size):
    query, key = torch.full((1, 20, 2, 4), 1e20), torch.full((1, 20, 2, 4), size)
    assert top_k_blocks(query, key, 5, 1)[0].tolist() == [[[0], [1], [2], [3]]] * 2
    key[:, 5:10] = 1.0
    chosen = top_k_blocks(query, key, 5, 3, is_causal=True)[0, 0]
    assert chosen[:, 0].tolist() == [0, 1, 2, 3]
    assert chosen.sort().values[:3].tolist() == [[-1, -1, 0], [-1, 0, 1], [0, 1, 2]]


def test_top_k_blocks_takes_no_more_than_there_are():
    assert top_k_blocks(Q, K, 8, 100).sort(-1).values.equal(torch.arange(BLOCKS).expand(2, 2, BLOCKS, BLOCKS))
    assert top_k_blocks(Q.half(), K.half(), 100, 1).tolist() == [[[[0]], [[0]]], [[[0]], [[0]]]]


def test_top_k_blocks_compiled_in_one_graph():
    def call(query, key):
        chosen = top_k_blocks(query, key, 8, 2, is_causal=True)
        return dilated_attention(query, key, key, GIVEN, block_layout=chosen, is_causal=True)

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(Q, K), call(Q, K))
