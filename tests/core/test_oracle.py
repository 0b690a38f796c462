"""The oracle against the definition computed row by row in numpy, sharing no code with it."""

import numpy as np
import pytest
import torch
from helpers.definition import brute_force, brute_force_padding, by_rows
from helpers.strategies import has_tokens, mixes_with_heads, patterns_with_heads
from hypothesis import assume, given, settings, strategies as st

from dilkit import Pattern
from dilkit.oracle import oracle_attention

BATCH, HEAD_DIM = 2, 3


def drawn_inputs(seq, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(BATCH, seq, h, HEAD_DIM, generator=generator, dtype=torch.float64) for h in (heads[0], heads[1], heads[1])
    )
    return q, k, v, torch.rand(BATCH, seq, generator=generator) < 0.4


@settings(max_examples=60, deadline=None)
@given(
    patterns_with_heads() | mixes_with_heads().filter(lambda drawn: drawn[0].tail == "exact"),
    st.integers(0, 13),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.0, 0.7, -1.3]),
)
def test_oracle_is_a_softmax_over_repeated_keys(drawn, seq, is_causal, masked, scale):
    pattern, heads = drawn
    assume(is_causal or has_tokens(pattern, seq))
    q, k, v, mask = drawn_inputs(seq, heads, seed=seq)
    count = brute_force(pattern, seq, heads, is_causal)
    count = np.repeat((np.minimum(count, 1) if pattern.overlap == "once" else count)[None], BATCH, axis=0)
    if masked:
        count = count * ~mask.numpy()[:, None, None, :]
    padding = brute_force_padding(pattern, seq, heads, is_causal)
    expected = by_rows(q.numpy(), k.numpy(), v.numpy(), count, padding, HEAD_DIM**-0.5 if scale is None else scale)
    options = dict(is_causal=is_causal, key_padding_mask=mask if masked else None, scale=scale)
    for got, want in zip(oracle_attention(q, k, v, pattern, **options), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)


def test_rows_that_see_nothing_are_zero_with_zero_gradients():
    q, k, v, mask = drawn_inputs(12, (4, 2), seed=0)
    mask[0] = True
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out, lse = oracle_attention(*tensors, Pattern([4], [2]), key_padding_mask=mask)
    empty = lse == -torch.inf
    assert bool(empty[0].all())
    assert 0 < int(empty[1].sum()) < empty[1].numel()
    assert bool((out.transpose(1, 2)[empty] == 0).all())
    (out.sin().sum() + lse.masked_fill(empty, 0).sum()).backward()
    assert all(bool(x.grad.isfinite().all()) for x in tensors)
    assert bool((q.grad.transpose(1, 2)[empty] == 0).all())
    assert all(bool((x.grad[0] == 0).all()) for x in (k, v))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_of_the_arithmetic_can_be_chosen(dtype):
    q, k, v, _ = drawn_inputs(9, (2, 2), seed=1)
    exact, rough = (oracle_attention(q, k, v, Pattern([4], [2]), dtype=kind)[0] for kind in ("float64", dtype))
    assert rough.dtype == getattr(torch, dtype)
    error = (rough.double() - exact).abs().max().item()
    assert 0 < error < 8 * torch.finfo(rough.dtype).eps
