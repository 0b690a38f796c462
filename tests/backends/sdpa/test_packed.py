"""Packed sequences on torch's kernels."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers.calls import starts_of
from helpers.sdpa import TorchRows, problem
from helpers.strategies import patterns_with_heads
from hypothesis import given, strategies as st

from dilkit import Pattern, Problem
from dilkit.backends.sdpa import segment_batches as tables
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS
from dilkit.backends.sdpa.segment_batches import segment_batches
from dilkit.inputs import Inputs

CPU = KERNELS[0]


def packed(pattern, lengths, heads=(1, 1), **options):
    sizes = dict(seq=max(1, *lengths), heads=heads[0], kv_heads=heads[1], head_dim=8)
    return Problem(pattern=pattern, varlen=True, **sizes, **options)


@given(patterns_with_heads(), st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_each_row_that_a_branch_keeps_is_in_one_batch(drawn, lengths):
    pattern, (heads, kv_heads) = drawn
    total, group, found = sum(lengths), heads // kv_heads, Counter[tuple[int, int]]()
    for batch in segment_batches(packed(pattern, lengths, (heads, kv_heads)), starts_of(lengths), total):
        keys = batch.keys.expand_as(batch.queries)
        padding = torch.zeros_like(keys, dtype=torch.bool) if batch.padding is None else batch.padding.expand_as(keys)
        assert (batch.queries[padding] == total * heads).all()
        rows, own = batch.queries[~padding].div(heads, rounding_mode="floor"), batch.queries[~padding] % heads
        assert torch.equal(keys[~padding], rows * kv_heads + own // group)
        found.update(zip(rows.tolist(), own.tolist(), strict=True))
    kept = Counter[tuple[int, int]]()
    for start, length in zip(starts_of(lengths).tolist(), lengths, strict=False):
        for branch, head in ((b, h) for b in pattern.branches for h in range(heads) if b.serves(h)):
            offset = pattern.among(kv_heads, kv_heads).offset(branch.dilation_rate, head // group)
            kept.update((start + i, head) for i in range(length) if i % branch.segment_length % branch.dilation_rate == offset)
    assert found == kept


def test_a_batch_takes_a_merge_and_three_additions():
    lengths, rows = [40, 7, 130, 0, 64], TorchRows()
    task, backend = packed(Pattern([16, 64], [1, 2]), lengths, (4, 4), requires_grad=True), SDPA(row_kernels=rows)
    q, k, v, dout = torch.randn(4, 1, sum(lengths), 4, 8).unbind()
    out, lse = backend.forward(Inputs(q, k, v, cu_seqlens=starts_of(lengths)), task)
    backend.backward(dout, Inputs(q, k, v, cu_seqlens=starts_of(lengths)), out, lse, task)
    later = sum(not batch.first for batch in segment_batches(task, starts_of(lengths), sum(lengths)))
    assert rows.calls == ["merge"] * later + ["add"] * 3 * later
    assert later


def test_thousands_of_sequences_take_a_few_calls():
    calls = []

    def counting(q, *others):
        calls.append(q.shape)
        return CPU.forward(q, *others)

    lengths = [i * 7 % 50 for i in range(3000)]
    task, backend = packed(Pattern([16, 64], [1, 4]), lengths), SDPA((replace(CPU, forward=counting),))
    q, k, v = torch.randn(3, 1, sum(lengths), 1, 8).unbind()
    backend.forward(Inputs(q, k, v, cu_seqlens=starts_of(lengths)), task)
    assert len(calls) < 40
    assert sum(size[0] * size[2] for size in calls) < 1.2 * sum(lengths) * (1 + 1 / 4)


def test_batches_of_long_inputs_are_cut(monkeypatch):
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 64)
    lengths = [100, 300, 7]
    for batch in segment_batches(packed(Pattern([16, 64], [1, 2]), lengths, (2, 1)), starts_of(lengths), 407):
        assert batch.queries.numel() <= 64


@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_without_a_mask_take_causal_sequences_only(is_causal):
    task = problem("sm_80", "bfloat16", varlen=True, is_causal=is_causal)
    assert SDPA().detail(task).startswith("flash kernel" if is_causal else "memory-efficient kernel")
    assert ("the kernel takes no mask, and segments are padded" in SDPA().detail(task)) is not is_causal


def test_padding_is_less_than_an_eighth():
    for length in range(1, 400):
        ((_, rows),) = tables.of_equal_size(torch.tensor([length]).numpy(), 1, 10**6, 10**6)
        assert length == rows
        (_, rows), _ = tables.of_equal_size(torch.tensor([length, 10**4]).numpy(), 1, 10**6, 10**6)
        assert length <= rows < length * 9 / 8 + 1e-9
