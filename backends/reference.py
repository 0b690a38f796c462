"""The definition as a backend: one softmax over the count, query block by query block. Exact, and slow.

Forward:

    S = softcap(scale * q k^T) + bias + log count    lse = logsumexp(S)    P = exp(S - lse)    out = P v

Backward, given the `out` and `lse` of the forward pass:

    delta = rowsum(dout * out)           dP = dout v^T             dS = P * (dP - delta)
    dq = scale * dS k                    dk = scale * dS^T q       dv = P^T dout        dS times softcap' in dq and dk
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dilkit.backend import COUNT, Backend, Limits
from dilkit.backends.ignored_keys import weighted
from dilkit.backends.packed_sequences import backward_each, forward_each
from dilkit.bias.form import BIASES, LoweredBias
from dilkit.checks import one_of
from dilkit.inputs import Inputs
from dilkit.pattern.lowering import GIVEN_FORMS
from dilkit.problem import DTYPES, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dilkit.decoding.protocol import Step
    from dilkit.op.dropout import Dropout

BLOCK_SCORES = 2**22
"""Scores held at once, over all heads: memory grows with the sequence, not with its square."""


class Reference(Backend):
    """`out = softmax(scale * q k^T + log count) v` on any device, computed in fp32, and in fp64 for fp64 tensors.

    `Reference(compute_dtype="float64", name="reference64")` computes in fp64 whatever the dtype of the tensors; register it with
    `dilkit.register_backend`. Matrix products are torch's: the same number of threads gives the same bits.
    """

    name = "reference"
    summary = "the definition, blockwise over queries: any device, any pattern, slow"
    requires = ("torch",)
    limits = Limits(
        devices=None,
        varlen=True,
        kv_cache=True,
        query_offset=True,
        stored=frozenset({*DTYPES, "int8"}),
        dropout=True,
        softcap=True,
        biases=frozenset(BIASES),
        forms=frozenset({COUNT}) | GIVEN_FORMS,
    )

    def __init__(self, compute_dtype: str | None = None, name: str = "reference") -> None:
        if compute_dtype is not None:
            one_of("compute_dtype", compute_dtype, DTYPES)
        self.compute_dtype = compute_dtype
        self.name = name

    def detail(self, problem: Problem) -> str:
        slow = "no kernel: every pair of tokens is scored, seen or not, in time that grows with the square of the length"
        return "" if problem.pattern.only_segments or problem.stored else slow

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        if inputs.cu_seqlens is not None or inputs.query_offset is not None:
            return forward_each(self, inputs, problem)
        if inputs.cache_seqlens is not None:
            return self._last_rows(inputs, problem)
        import torch

        from dilkit.op.boundary import lse_dtype

        q, k, v = (self._by_head(x, problem) for x in inputs[:3])
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for rows, scores, _ in _score_blocks(q, k, problem, inputs):
            lse[..., rows] = torch.logsumexp(scores, dim=-1)
            p = _probabilities(scores, lse[..., rows])
            out[..., rows, :] = weighted(p if inputs.dropout is None else p * _factors(inputs.dropout, rows, p, problem), v)
        return _by_token(out, inputs.query), lse.flatten(1, 2).to(lse_dtype(inputs.query.dtype))

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        import torch

        if inputs.cu_seqlens is not None or inputs.query_offset is not None:
            return backward_each(self, dout, inputs, out, lse, problem)
        from dilkit.op.boundary import lse_dtype

        q, k, v, do, o = (self._by_head(x, problem) for x in (*inputs[:3], dout, out))
        lse = lse.to(q.dtype).reshape(q.shape[:-1])
        delta = (do * o).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        bias = None if inputs.bias is None or not inputs.bias.form.learned else _as(inputs.bias, q.dtype)
        dbias = None if bias is None else torch.zeros_like(bias.weights)
        for rows, scores, slope in _score_blocks(q, k, problem, inputs):
            p, dout_rows = _probabilities(scores, lse[..., rows]), do[..., rows, :]
            unseen, dp = scores == -math.inf, dout_rows @ v.mT
            weights = p
            if inputs.dropout is not None:
                factors = _factors(inputs.dropout, rows, p, problem)
                weights, dp = p * factors, (dp * factors).masked_fill(factors == 0, 0.0)
            dscores = (p * (dp - delta[..., rows, None])).masked_fill(unseen, 0.0)
            if bias is not None and dbias is not None:
                from dilkit.bias.evaluated import gradient

                keys = torch.arange(k.shape[-2], device=k.device)
                positions = torch.arange(rows.start, rows.stop, device=k.device) + (problem.query_offset or 0)
                dbias += gradient(bias, dscores.flatten(1, 2), positions, keys)
            dscores = dscores * problem.scale if slope is None else (dscores * (slope * problem.scale)).masked_fill(unseen, 0.0)
            dq[..., rows, :] = weighted(dscores, k)
            dk += weighted(dscores.mT, q[..., rows, :]).sum(2, keepdim=True)
            dv += weighted(weights.mT, dout_rows).sum(2, keepdim=True)
        gradients = _by_token(dq, inputs.query), _by_token(dk, inputs.key), _by_token(dv, inputs.value)
        return gradients if dbias is None else (*gradients, dbias.to(lse_dtype(inputs.query.dtype)))

    def attend_stored(self, step: Step, problem: Problem) -> tuple[Tensor, Tensor]:
        from dilkit.backends.stored_rows import attend

        return attend(step, problem, self._computing(step.query))

    def _last_rows(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        parts = []
        assert inputs.cache_seqlens is not None
        for b, length in enumerate(inputs.cache_seqlens.tolist()):
            query, key, value = (x[b : b + 1] for x in inputs[:3])
            bias = inputs.bias
            if bias is not None and bias.positions is not None:
                element = b if len(bias.positions) > 1 else 0
                bias = bias._replace(positions=bias.positions[element : element + 1, :length])
            sequence = Inputs(query, key[:, :length], value[:, :length], bias=bias)
            rows = query.shape[1]
            posed = replace(problem, batch=1, seq=length, kv_cache=False, queries=rows, query_offset=length - rows)
            parts.append(self.forward(sequence, posed))
        return _joined(parts)

    def _by_head(self, x: Tensor, problem: Problem) -> Tensor:
        """Reshape `(batch, seq, heads, head_dim)` to `(batch, kv_heads, group, seq, head_dim)` in the computing dtype."""
        batch, seq, heads, head_dim = x.shape
        by_head = x.transpose(1, 2).reshape(batch, problem.kv_heads, heads // problem.kv_heads, seq, head_dim)
        return by_head.to(self._computing(x)).contiguous()

    def _computing(self, x: Tensor) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.compute_dtype or ("float64" if x.dtype == torch.float64 else "float32"))
        return dtype


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    import torch

    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """Reshape `(batch, kv_heads, group, seq, head_dim)` to `(batch, seq, heads, head_dim)` in the dtype of `like`."""
    return x.flatten(1, 2).transpose(1, 2).to(like.dtype).contiguous()


def _as(bias: LoweredBias, dtype: torch.dtype) -> LoweredBias:
    positions = None if bias.positions is None else bias.positions.to(dtype)
    return bias._replace(weights=bias.weights.to(dtype), positions=positions)


def _score_blocks(q: Tensor, k: Tensor, problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Query blocks, as slices of rows, with their scores `(batch, kv_heads, group, rows, seq)`: -inf where nothing is seen.

    The last is the derivative of the softcap, where there is one.
    """
    import torch

    from dilkit.op.given import counted

    seq, heads, kv_heads = problem.seq, problem.heads, problem.kv_heads
    first, mask = problem.query_offset or 0, inputs.key_padding_mask
    end, block_rows = first + q.shape[-2], max(1, BLOCK_SCORES // max(1, problem.batch * heads * seq))
    for start in range(first, end, block_rows):
        rows = torch.arange(start, min(start + block_rows, end), device=q.device)
        options: Any = dict(kv_heads=kv_heads, is_causal=problem.is_causal, span=range(first, end))
        count = counted(inputs, problem.pattern, rows, **options)
        added = count.to(q.dtype).log().view(len(count), kv_heads, heads // kv_heads, len(rows), seq)
        unseen = (added == -math.inf).expand(problem.batch, -1, -1, -1, -1)
        if inputs.bias is not None:
            from dilkit.bias.evaluated import evaluate

            of_pairs = evaluate(_as(inputs.bias, q.dtype), rows, torch.arange(seq, device=q.device))
            added = added + of_pairs.reshape(len(of_pairs), kv_heads, -1, len(rows), seq)
        if mask is not None:
            unseen = unseen | mask[:, None, None, None, :]
        block = slice(start - first, start - first + len(rows))
        scores, slope = problem.scale * (q[..., block, :] @ k.mT), None
        if problem.softcap:
            share = torch.tanh(scores / problem.softcap)
            scores, slope = problem.softcap * share, 1 - share * share
        yield block, (scores + added).masked_fill(unseen, -math.inf), slope


def _factors(dropout: Dropout, rows: slice, p: Tensor, problem: Problem) -> Tensor:
    """Return dropout's factors for a block of probabilities `p` `(batch, kv_heads, group, rows, seq)`; 0 where dropped."""
    import torch

    first = rows.start + max(problem.query_offset or 0, 0)
    queries, keys = torch.arange(first, first + p.shape[3]), torch.arange(p.shape[4])
    survives = dropout.kept(problem.heads, queries.to(p.device), keys.to(p.device), problem.batch)
    return survives.view(p.shape).to(p.dtype) * dropout.factor


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Compute `exp(scores - lse)`; 0 for unseen keys and for rows that see nothing, where lse is -inf."""
    p = (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp()
    return p.masked_fill(scores == -math.inf, 0.0)
