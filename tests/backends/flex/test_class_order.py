"""One pass in class order: its blocks against the count, what torch's compiler makes of it, and when it is chosen."""

import numpy as np
import pytest
import torch
from helpers.fakes import registered
from helpers.flex_on_cpu import FlexInClasses
from hypothesis import given, settings, strategies as st

from dilkit import Device, DilatedSegment, GlobalTokens, Pattern, Problem, SlidingWindow, dilated_attention
from dilkit.backends.flex import backend
from dilkit.backends.flex.backend import Flex
from dilkit.pattern.flex.class_order import class_order, class_rate
from dilkit.pattern.flex.pairs import shown_by_several
from dilkit.pattern.lowering import lower

A = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
EVERY_PAIR = 4


@st.composite
def dilated(draw):
    """Draw a pattern whose rates divide the largest, a length, and heads over key/value heads."""
    rate, kv_heads, group = draw(st.sampled_from([2, 3, 4, 6])), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads, seq = kv_heads * group, draw(st.integers(rate * EVERY_PAIR, 150))
    served = st.none() | st.integers(1, heads).map(lambda stop: (0, stop))
    rates = st.sampled_from([divisor for divisor in range(1, rate + 1) if rate % divisor == 0])
    lengths = st.integers(EVERY_PAIR, 5 * EVERY_PAIR).map(lambda number: number * rate)
    branches = draw(st.lists(st.builds(DilatedSegment, lengths, rates, heads=served), max_size=3))
    branches.append(DilatedSegment(draw(lengths), rate))
    if draw(st.booleans()):
        branches.append(SlidingWindow(draw(lengths), draw(st.sampled_from([1, rate]))))
    if draw(st.booleans()):
        branches.append(GlobalTokens(sorted(draw(st.sets(st.integers(0, seq - 1), min_size=1, max_size=9)))))
    overlap, offset = draw(st.sampled_from(["count", "once"])), draw(st.sampled_from(["modulo", "block"]))
    return Pattern.of(*draw(st.permutations(branches)), overlap=overlap, offset=offset), seq, (heads, kv_heads)


@given(drawn=dilated(), is_causal=st.booleans())
@settings(max_examples=25)
def test_every_pair_is_shown_once_with_its_count(drawn, is_causal):
    pattern, seq, (heads, kv_heads) = drawn
    forms = lower(pattern, seq, heads, kv_heads)
    rate = class_rate(forms, seq, EVERY_PAIR)
    assert rate > 1
    places = -(-seq // (rate * EVERY_PAIR)) * EVERY_PAIR
    several = shown_by_several(forms, pattern.overlap)
    order = class_order(forms, seq, places, rate, (heads, kv_heads), is_causal, several, EVERY_PAIR)
    count = np.zeros((heads, rate * places, rate * places), np.int64)
    count[:, :seq, :seq] = pattern.count(seq, heads, kv_heads=kv_heads, is_causal=is_causal)
    shown = np.zeros_like(count)
    for blocks in (order.whole, order.partial):
        for head, queries, keys, level in _pairs(order, blocks, heads):
            own = np.ix_([head], queries, keys)
            if blocks is order.whole:
                assert (count[own] == level).all()
                assert max(*queries, *keys) < seq
            shown[own] += np.where(count[own] == level, level, 0)
    assert (shown == count).all()


def _pairs(order, blocks, heads):
    """Return each pair of blocks as it is listed: head, tokens of queries and of keys, and the count of the keys."""
    rows, columns = order.rate * order.places // order.block, order.key_blocks.shape[1]
    numbers, listed = blocks.listed(heads, rows)
    key_numbers, key_listed = blocks.listed(heads, columns, of_keys=True)
    found = {(h, q, int(k)) for h in range(heads) for q in range(rows) for k in listed[h, q, : numbers[h, q]]}
    assert found == {(h, int(q), k) for h in range(heads) for k in range(columns) for q in key_listed[h, k, : key_numbers[h, k]]}
    tokens = np.arange(order.rate * order.places).reshape(order.places, order.rate).T.reshape(rows, order.block)
    keys = order.tokens.reshape(len(order.key_blocks), columns, order.block)
    levels = [max((start, level) for level, start in order.levels if start <= key)[1] for key in range(columns)]
    group = heads // len(order.key_blocks)
    return [(h, tokens[q], keys[h // group, k], levels[k]) for h, q, k in found]


@pytest.mark.slow
def test_torch_compiles_both_passes_and_nothing_for_lengths_padded_alike():
    """Without generating a kernel: the operators of torch are traced, and called as they are."""

    class Traced(FlexInClasses):
        name = "flex_traced"

        def compiled(self, function, problem, *options):
            return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)

    pattern = Pattern([64, 256], [1, 2])
    for seq in (256, 250, 243):
        q, (k, v), results = torch.randn(1, seq, 2, 16), torch.randn(2, 1, seq, 1, 16), []
        with registered(Traced()) as name, torch._dynamo.config.patch(error_on_recompile=seq == 243):
            for chosen in (name, "reference"):
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                out, lse = dilated_attention(*leaves, pattern, is_causal=True, return_lse=True, backend=chosen)
                (out.sin().sum() + lse.cos().sum()).backward()
                results.append((out, lse, *(x.grad for x in leaves)))
        for mine, expected in zip(*results, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_it_is_chosen_where_it_pays_and_names_its_kernel(monkeypatch):
    def words(device="sm_90", pattern=A, seq=131_072, dtype="bfloat16", **options):
        sizes = dict(seq=seq, heads=8, head_dim=64, device=Device.assume(device))
        return Flex().detail(Problem(pattern=pattern, dtype=dtype, **sizes, **options))

    assert "3,154,116,608 pairs in blocks, at least 34,359,738,368 without; 788,529,152 bytes of copies" in words()
    monkeypatch.setattr(backend, "installed", lambda module: True)
    assert "kernel FLASH" in words()
    for other in (words("sm_80"), words("sm_100"), words(is_causal=True), words(dtype="float32"), words(seq=131_071)):
        assert "kernel TRITON" in other
    small_segments = Pattern([2048, 8192, 32768], [1, 4, 64])
    for other in (words(pattern=small_segments), words(pattern=Pattern.dense()), words(key_padding_mask=True)):
        assert "kernel" not in other.partition("torch.compile")[0]
