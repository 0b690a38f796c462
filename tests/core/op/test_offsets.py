"""Queries that are others than the keys, at their positions among these; values of another head_dim."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dilkit
from dilkit import (
    BlockSparse,
    CoordinateAlibi,
    Documents,
    Intervals,
    Pattern,
    PatternError,
    SlidingWindow,
    dilated_attention,
    dilated_attention_varlen,
)
from dilkit.oracle import oracle_attention


@dilkit.register_kind
@dataclass(frozen=True)
class Near(dilkit.Branch):
    """Tokens see those near them. It has no forms: `sees` is evaluated."""

    kind: ClassVar[str] = "nearby"

    reach: int
    heads: tuple[int, int] | None = None

    def sees(self, rows, keys, heads):
        return ((rows[:, None] - keys).abs() <= self.reach)[None]


PATTERN, DENSE = Pattern([8, 32], [1, 4]), Pattern.dense()
Q, K = torch.randn(2, 10, 4, 8), torch.randn(2, 25, 2, 8)


def starts(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_element_of_a_batch_may_have_its_own_offset(backend, is_causal):
    pattern = Pattern.of(SlidingWindow(before=6, after=2))
    inputs = [x.clone().requires_grad_() for x in (Q, K, K)]
    out = dilated_attention(*inputs, pattern, is_causal=is_causal, query_offset=starts(-4, 17), backend=backend)
    found = torch.autograd.grad(out.square().sum(), inputs)
    parts = [
        oracle_attention(*(x[b : b + 1].double() for x in inputs), pattern, is_causal=is_causal, query_offset=offset)[0]
        for b, offset in enumerate((-4, 17))
    ]
    torch.testing.assert_close(out.double(), torch.cat(parts), atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad(torch.cat(parts).square().sum(), inputs)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_chunk_of_queries_has_the_rows_of_the_whole_call():
    query = torch.randn(2, 25, 4, 8)
    for is_causal in (False, True):
        whole = dilated_attention(query, K, K, PATTERN, is_causal=is_causal)
        chunk = dilated_attention(query[:, 7:19], K, K, PATTERN, is_causal=is_causal, query_offset=7)
        torch.testing.assert_close(chunk, whole[:, 7:19])
    assert torch.equal(
        dilated_attention(query[:, 18:], K, K, PATTERN, is_causal=True),
        dilated_attention(query[:, 18:], K, K, PATTERN, is_causal=True, query_offset=18),
    )


@pytest.mark.parametrize("width", [3, 8, 20])
def test_values_may_be_of_another_width(width):
    value = torch.randn(2, 25, 2, width, requires_grad=True)
    out = dilated_attention(Q, K, value, DENSE)
    wanted = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (Q, K, value)), enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), value) for x in (out, wanted)))
    packed = dilated_attention_varlen(Q[0], K[0], value[0], DENSE, starts(0, 10), cu_seqlens_k=starts(0, 25))
    torch.testing.assert_close(packed, out[0])


def test_a_compiled_and_a_mapped_call_have_the_same_results():
    def call(query, key):
        return dilated_attention(query, key, key, PATTERN, is_causal=True)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(Q, K), call(Q, K))
    mapped = torch.func.vmap(call)(torch.stack([Q, Q + 1]), torch.stack([K, K + 1]))
    assert torch.equal(mapped[1], call(Q + 1, K + 1))


def test_without_keys_or_queries_there_is_nothing():
    query = Q.clone().requires_grad_()
    out, lse = dilated_attention(query, K[:, :0], K[:, :0], DENSE, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not torch.autograd.grad(out.sum(), query)[0].any()
    assert dilated_attention(Q[:, :0], K, K, DENSE).shape == (2, 0, 4, 8)
    sink = torch.randn(4)
    assert torch.equal(
        dilated_attention(Q, K[:, :0], K[:, :0], DENSE, sink=sink, return_lse=True)[1], sink[:, None].expand(2, 4, 10)
    )


COORDINATES = CoordinateAlibi(torch.rand(4), torch.rand(25, 2))


def test_queries_beyond_the_keys_see_what_a_kind_without_forms_shows():
    pattern = Pattern.of(Near(2))
    query, key = torch.randn(1, 12, 2, 8), torch.randn(1, 8, 2, 8)
    for offset in (0, 5):
        out = dilated_attention(query, key, key, pattern, query_offset=offset)
        assert torch.equal(out, dilated_attention(query, key, key, pattern, query_offset=starts(offset)))
        torch.testing.assert_close(out, oracle_attention(query, key, key, pattern, query_offset=offset, dtype="float32")[0])


INTERVALS = Pattern.of(Intervals([[0]] * 10, [[3]] * 10))
WRONG = {
    "a fraction": (dict(query_offset=1.5), "query_offset=1.5 is a float"),
    "far away": (dict(query_offset=10**30), "farther from the keys"),
    "another batch": (dict(query_offset=starts(1, 2, 3)), r"\(batch,\) = \(2,\)"),
    "offsets of int64": (dict(query_offset=torch.tensor([1, 2])), "int32"),
    "the mask of the queries": (dict(key_padding_mask=torch.zeros(2, 10, dtype=torch.bool)), r"\(2, 25\) is needed"),
    "padded tails": (dict(pattern=Pattern([4], [2], tail="zeros")), 'tail="exact"'),
    "given blocks": (
        dict(pattern=Pattern.of(BlockSparse(None, 25)), block_layout=torch.ones(1, 1, 1, 1).bool()),
        "as many queries",
    ),
    "coordinates": (dict(bias=COORDINATES, query_offset=20), "coordinates of the keys"),
    "keys beyond a kind": (dict(pattern=INTERVALS), "seq=25"),
    "queries beyond a kind": (dict(pattern=Pattern.of(Documents([25, 5])), query_offset=21), "seq=31"),
    "queries of one sequence beyond a kind": (
        dict(pattern=Pattern.of(Documents([25, 5])), query_offset=starts(0, 21), backend="native"),
        "seq=31",
    ),
    "a tensor far away": (
        dict(pattern=Pattern.of(Near(2)), query_offset=starts(0, 10**6), backend="native"),
        "below 35 are needed",
    ),
    "a segment before the keys": (dict(query_offset=-1, backend="native"), "from 0 on"),
    "a grid": (dict(pattern=Pattern.natten((5, 5), (3, 3)), backend="native"), "as many queries as keys"),
    "a backend without": (dict(backend="triton"), "query i has to be key i"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_refused_by_name(wrong):
    options, text = WRONG[wrong]
    with pytest.raises((ValueError, TypeError, PatternError), match=text):
        dilated_attention(Q, K, K, **dict(pattern=DENSE) | options)


PACKED = {
    "other keys without their starts": ({}, "key has seq 25 and query 10"),
    "fewer sequences of keys": (dict(cu_seqlens_k=starts(0, 25)), "of 1 sequences and cu_seqlens of 2"),
    "starts that end early": (dict(cu_seqlens_k=starts(0, 9, 24)), "ends with 24"),
    "starts that decrease": (dict(cu_seqlens_k=starts(0, 26, 25)), "decreases at index 2"),
    "keys beyond a kind": (dict(cu_seqlens_k=starts(0, 9, 25), pattern=Pattern.of(Documents([5, 7]))), "seq=16"),
    "one offset for all": (dict(cu_seqlens_k=starts(0, 9, 25), query_offset=1), r"int32 tensor \(sequences,\)"),
}


@pytest.mark.parametrize("wrong", PACKED)
def test_what_packed_sequences_cannot_have_is_refused_by_name(wrong):
    options, text = PACKED[wrong]
    with pytest.raises((ValueError, TypeError), match=text):
        dilated_attention_varlen(Q[0], K[0], K[0], cu_seqlens=starts(0, 4, 10), **dict(pattern=DENSE) | options)
