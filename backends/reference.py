"""The definition as a backend: one softmax over the count, query block by query block. Exact, and slow.

Forward:

    S = scale * q k^T + log count        lse = logsumexp(S)        P = exp(S - lse)        out = P v

Backward, given the `out` and `lse` of the forward pass:

    delta = rowsum(dout * out)           dP = dout v^T             dS = P * (dP - delta)
    dq = scale * dS k                    dk = scale * dS^T q       dv = P^T dout
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dilkit.backend import COUNT, Backend, Limits
from dilkit.checks import one_of
from dilkit.inputs import Inputs
from dilkit.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.op.dropout import Dropout

BLOCK_SCORES = 2**22
"""Scores held at once, over all heads: memory grows with the sequence, not with its square."""


class Reference(Backend):
    """`out = softmax(scale * q k^T + log count) v` on any device, computed in fp32, and in fp64 for fp64 tensors.

    `Reference(compute_dtype="float64", name="reference64")` computes in fp64 whatever the dtype of the tensors; register it with
    `dilkit.register_backend`. The matrix products are torch's: the same number of threads gives the same bits, another one
    perhaps others.
    """

    name = "reference"
    summary = "the definition, blockwise over queries: any device, any pattern, slow"
    requires = ("torch",)
    limits = Limits(devices=None, varlen=True, kv_cache=True, dropout=True, forms=frozenset({COUNT}))

    def __init__(self, compute_dtype: str | None = None, name: str = "reference") -> None:
        if compute_dtype is not None:
            one_of("compute_dtype", compute_dtype, DTYPES)
        self.compute_dtype = compute_dtype
        self.name = name

    def detail(self, problem: Problem) -> str:
        slow = "no kernel: every pair of tokens is scored, seen or not, in time that grows with the square of the length"
        return "" if problem.pattern.only_segments else slow

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        if inputs.cu_seqlens is not None:
            return self._packed_forward(inputs, problem)
        if inputs.cache_seqlens is not None:
            return self._last_rows(inputs, problem)
        import torch

        q, k, v = (self._by_head(x, problem) for x in inputs[:3])
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for rows, scores in _score_blocks(q, k, problem, inputs.key_padding_mask):
            lse[..., rows] = torch.logsumexp(scores, dim=-1)
            p = _probabilities(scores, lse[..., rows])
            out[..., rows, :] = _weighted(p if inputs.dropout is None else p * _factors(inputs.dropout, rows, p, problem), v)
        lse_dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
        return _by_token(out, inputs.query), lse.flatten(1, 2).to(lse_dtype)

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        if inputs.cu_seqlens is not None:
            return self._packed_backward(dout, inputs, out, lse, problem)
        import torch

        q, k, v, do, o = (self._by_head(x, problem) for x in (*inputs[:3], dout, out))
        lse = lse.to(q.dtype).reshape(q.shape[:-1])
        delta = (do * o).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, scores in _score_blocks(q, k, problem, inputs.key_padding_mask):
            p, dout_rows = _probabilities(scores, lse[..., rows]), do[..., rows, :]
            unseen, dp = scores == -math.inf, dout_rows @ v.mT
            kept = p
            if inputs.dropout is not None:
                factors = _factors(inputs.dropout, rows, p, problem)
                kept, dp = p * factors, (dp * factors).masked_fill(factors == 0, 0.0)
            dscores = (p * (dp - delta[..., rows, None]) * problem.scale).masked_fill(unseen, 0.0)
            dq[..., rows, :] = _weighted(dscores, k)
            dk += _weighted(dscores.mT, q[..., rows, :]).sum(2, keepdim=True)
            dv += _weighted(kept.mT, dout_rows).sum(2, keepdim=True)
        return _by_token(dq, inputs.query), _by_token(dk, inputs.key), _by_token(dv, inputs.value)

    def _packed_forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        from dilkit.op.boundary import empty_outputs

        out, lse = empty_outputs(inputs.query)
        for rows, one, own in _sequences(problem, inputs):
            out[:, rows], lse[..., rows] = self.forward(own, one)
        return out, lse

    def _packed_backward(
        self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
        for rows, one, own in _sequences(problem, inputs):
            gradients = self.backward(dout[:, rows], own, out[:, rows], lse[..., rows], one)
            dq[:, rows], dk[:, rows], dv[:, rows] = gradients
        return dq, dk, dv

    def _last_rows(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        parts, (query, key, value) = [], inputs[:3]
        assert inputs.cache_seqlens is not None
        for b, length in enumerate(inputs.cache_seqlens.tolist()):
            one = replace(problem, batch=1, seq=length, kv_cache=False)
            parts.append(self.forward(Inputs(query[b : b + 1], key[b : b + 1, :length], value[b : b + 1, :length]), one))
        return _joined(parts)

    def _by_head(self, x: Tensor, problem: Problem) -> Tensor:
        """`(batch, seq, heads, head_dim)` -> `(batch, kv_heads, group, seq, head_dim)` in the computing dtype."""
        import torch

        batch, seq, heads, head_dim = x.shape
        kv_heads = problem.kv_heads
        name = self.compute_dtype or ("float64" if x.dtype == torch.float64 else "float32")
        by_head = x.transpose(1, 2).reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)
        return by_head.to(getattr(torch, name)).contiguous()


def _sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, Problem, Inputs]]:
    """The rows of each packed sequence that has any, with problem and inputs of that sequence alone."""
    assert inputs.cu_seqlens is not None
    for number, (start, stop) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        if start < stop:
            rows, (query, key, value) = slice(start, stop), inputs[:3]
            dropout = None if inputs.dropout is None else inputs.dropout.of_sequence(number)
            own = Inputs(query[:, rows], key[:, rows], value[:, rows], dropout=dropout)
            yield rows, replace(problem, seq=stop - start, varlen=False), own


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results of sequences as those of a batch."""
    import torch

    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """`(batch, kv_heads, group, seq, head_dim)` -> `(batch, seq, heads, head_dim)` in the dtype of `like`."""
    return x.flatten(1, 2).transpose(1, 2).to(like.dtype).contiguous()


def _score_blocks(q: Tensor, k: Tensor, problem: Problem, mask: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Query blocks, as slices of rows, with their scores `(batch, kv_heads, group, rows, seq)`: -inf where nothing is seen.

    `q` holds all rows of the sequence, or the last ones.
    """
    import torch

    seq, heads, kv_heads = problem.seq, problem.heads, problem.kv_heads
    first = seq - q.shape[-2]
    block_rows = max(1, BLOCK_SCORES // max(1, problem.batch * heads * seq))
    for start in range(first, seq, block_rows):
        rows = torch.arange(start, min(start + block_rows, seq), device=q.device)
        count = problem.pattern.count_rows(rows, seq, heads, kv_heads=kv_heads, is_causal=problem.is_causal)
        bias = count.to(q.dtype).log().view(kv_heads, heads // kv_heads, len(rows), seq)
        unseen = (bias == -math.inf).expand(problem.batch, -1, -1, -1, -1)
        if mask is not None:
            unseen = unseen | mask[:, None, None, None, :]
        block = slice(start - first, start - first + block_rows)
        yield block, (problem.scale * (q[..., block, :] @ k.mT) + bias).masked_fill(unseen, -math.inf)


def _factors(dropout: Dropout, rows: slice, p: Tensor, problem: Problem) -> Tensor:
    """What the probabilities `p` `(batch, kv_heads, group, rows, seq)` of a block are multiplied by: 0 where they are dropped."""
    import torch

    queries, keys = torch.arange(rows.start, rows.start + p.shape[3]), torch.arange(p.shape[4])
    kept = dropout.kept(problem.heads, queries.to(p.device), keys.to(p.device), problem.batch)
    return kept.view(p.shape).to(p.dtype) * dropout.factor


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """`exp(scores - lse)`, and 0 in rows that see nothing, where lse is -inf, and for keys that a row does not see."""
    p = (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp()
    return p.masked_fill(scores == -math.inf, 0.0)


def _weighted(weights: Tensor, x: Tensor) -> Tensor:
    """`weights @ x`, in which rows of `x` with weight 0 add nothing, be they NaN."""
    product, finite = weights @ x, x.isfinite()
    if finite.all():
        return product
    touched = (weights != 0).to(x.dtype) @ (~finite).to(x.dtype) > 0
    return product.where(touched, weights @ x.masked_fill(~finite, 0.0))
