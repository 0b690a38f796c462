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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        key_padding_mask: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        q, k, v = (self._by_head(x, problem) for x in (query, key, value))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for rows, scores in _score_blocks(q, k, problem, key_padding_mask):
            lse[..., rows] = torch.logsumexp(scores, dim=-1)
            p = _probabilities(scores, lse[..., rows])
            out[..., rows, :] = _weighted(p if dropout is None else p * _factors(dropout, rows, p, problem), v)
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        return _by_token(out, query), lse.flatten(1, 2).to(lse_dtype)

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        key_padding_mask: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        q, k, v, do, o = (self._by_head(x, problem) for x in (query, key, value, dout, out))
        lse = lse.to(q.dtype).reshape(q.shape[:-1])
        delta = (do * o).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, scores in _score_blocks(q, k, problem, key_padding_mask):
            p, dout_rows = _probabilities(scores, lse[..., rows]), do[..., rows, :]
            unseen, dp = scores == -math.inf, dout_rows @ v.mT
            kept = p
            if dropout is not None:
                factors = _factors(dropout, rows, p, problem)
                kept, dp = p * factors, (dp * factors).masked_fill(factors == 0, 0.0)
            dscores = (p * (dp - delta[..., rows, None]) * problem.scale).masked_fill(unseen, 0.0)
            dq[..., rows, :] = _weighted(dscores, k)
            dk += _weighted(dscores.mT, q[..., rows, :]).sum(2, keepdim=True)
            dv += _weighted(kept.mT, dout_rows).sum(2, keepdim=True)
        return _by_token(dq, query), _by_token(dk, key), _by_token(dv, value)

    def forward_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        cu_seqlens: Tensor,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        from dilkit.op.boundary import empty_outputs

        out, lse = empty_outputs(query)
        for rows, one, own in _sequences(problem, cu_seqlens, dropout):
            out[:, rows], lse[..., rows] = self.forward(query[:, rows], key[:, rows], value[:, rows], one, None, own)
        return out, lse

    def backward_varlen(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        cu_seqlens: Tensor,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
        for rows, one, own in _sequences(problem, cu_seqlens, dropout):
            do, q, k, v, o = (x[:, rows] for x in (dout, query, key, value, out))
            dq[:, rows], dk[:, rows], dv[:, rows] = self.backward(do, q, k, v, o, lse[..., rows], one, None, own)
        return dq, dk, dv

    def forward_last(self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, lengths: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for b, length in enumerate(lengths.tolist()):
            one = replace(problem, batch=1, seq=length, kv_cache=False)
            parts.append(self.forward(query[b : b + 1], key[b : b + 1, :length], value[b : b + 1, :length], one))
        return _joined(parts)

    def _by_head(self, x: Tensor, problem: Problem) -> Tensor:
        """`(batch, seq, heads, head_dim)` -> `(batch, kv_heads, group, seq, head_dim)` in the computing dtype."""
        import torch

        batch, seq, heads, head_dim = x.shape
        kv_heads = problem.kv_heads
        name = self.compute_dtype or ("float64" if x.dtype == torch.float64 else "float32")
        by_head = x.transpose(1, 2).reshape(batch, kv_heads, heads // kv_heads, seq, head_dim)
        return by_head.to(getattr(torch, name)).contiguous()


def _sequences(problem: Problem, cu_seqlens: Tensor, dropout: Dropout | None) -> Iterator[tuple[slice, Problem, Dropout | None]]:
    """The rows of each packed sequence that has any, with problem and dropout of that sequence alone."""
    for number, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        if start < stop:
            own = None if dropout is None else dropout.of_sequence(number)
            yield slice(start, stop), replace(problem, seq=stop - start, varlen=False), own


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
