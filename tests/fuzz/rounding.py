"""The largest error by rounding alone of each number of a result: a bound of first order, from the sizes of what is added up.

    scores:  |scale| * |q| . |k| and |lse|, in the accumulating dtype        P, and with it dS:  their own dtype

The conformance suite has the stricter rule: it compares the largest error with that of plain torch math. But plain math keeps
its scores for gradients, and may be exact for equal or single keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from dilkit.oracle import bias_of_rows, oracle_attention
from dilkit.problem import Problem
from dilkit.testing.accuracy import Results, dropout_in
from dilkit.testing.tensors import Tensors

LEAST = 1e-30
"""Shares that are smaller may be 0 as well."""
SEVERAL = 4.0
"""Roundings of each kind that may fall together."""


def within_rounding(problem: Problem, tensors: Tensors, found: Results, exact: Results, lengths: Sequence[int] = ()) -> bool:
    bounds = _of_sequences(problem, tensors, lengths) if lengths else rounding(problem, tensors)

    def is_right(found, exact, bound):
        beyond = exact.isfinite() & (exact.abs() + bound > torch.finfo(found.dtype).max)  # gradients of scores that are large
        return beyond | (distances(found, exact) <= bound)

    return all(bool(is_right(x, exact[name], SEVERAL * bounds[name]).all()) for name, x in found.items())


def distances(found: Tensor, exact: Tensor) -> Tensor:
    found = found.detach().double()
    return torch.where(found == exact, 0.0, (found - exact).abs()).nan_to_num(nan=torch.inf)


def _of_sequences(problem: Problem, tensors: Tensors, lengths: Sequence[int]) -> Results:
    parts = []
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        if length:
            q, k, v, dout = (x[:, stop - length : stop] for x in (*tensors.qkv, tensors.dout))
            dlse = None if tensors.dlse is None else tensors.dlse[:, :, stop - length : stop]
            one = replace(tensors, query=q, key=k, value=v, dout=dout, dlse=dlse)
            parts.append(rounding(replace(problem, seq=length, varlen=False), one))
    whole = {name: torch.cat([part[name] for part in parts], 2 if name == "lse" else 1) for name in parts[0] if name != "dsink"}
    return whole | ({"dsink": sum(part["dsink"] for part in parts)} if "dsink" in parts[0] else {})


def rounding(problem: Problem, tensors: Tensors) -> Results:
    """Return the bound for every number of `out`, `lse`, `dq`, `dk`, `dv`, and `dsink` for sinks."""
    kind = torch.finfo(getattr(torch, problem.dtype))
    own, least = kind.eps, max(LEAST, kind.smallest_normal * kind.eps)  # the latter is the rounding of subnormal numbers
    fine = min(own, torch.finfo(torch.float32).eps)
    group, scale = problem.heads // problem.kv_heads, abs(problem.scale)
    q, k, v, dout = (x.detach().double().transpose(1, 2) for x in (*tensors.qkv, tensors.dout))
    if tensors.mask is not None:
        k, v = (x.masked_fill(tensors.mask[:, None, :, None], 0.0) for x in (k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    dlse = 0.0 if tensors.dlse is None else tensors.dlse.double()[..., None]
    out, lse, share, count, added = _exact(problem, tensors, q, k)
    kept, seen = _kept(problem), count != 0
    noise = fine * (scale * q.abs() @ k.abs().mT + added.abs() + lse[..., None].abs()) + fine
    share_error = _share_error(share, noise, count.clamp(min=1)) + share.exp() * own + least * seen
    share = share.exp()
    out_error = (kept * share_error) @ v.abs() + own * out.abs()
    slope = kept * (dout @ v.mT) - (dout * out).sum(-1, keepdim=True) + dlse
    slope_error = own * (kept * (dout.abs() @ v.abs().mT) + (dout * out).abs().sum(-1, keepdim=True) + abs(dlse))
    slope_error = slope_error + (dout.abs() * out_error).sum(-1, keepdim=True)
    ds_error = scale * (share * slope_error + slope.abs() * share_error + share_error * abs(dlse) + least * seen)
    errors = dict(out=out_error, dq=ds_error @ k.abs(), dk=ds_error.mT @ q.abs(), dv=(kept * share_error).mT @ dout.abs())
    for name in ("dk", "dv"):
        errors[name] = errors[name].unflatten(1, (-1, group)).sum(2)
    bounds = {name: (1 + own) * x.transpose(1, 2) + least for name, x in errors.items()}
    bounds["lse"] = (noise * seen).amax(-1) + fine * (1 + lse.abs())
    if tensors.sink is not None:
        sink = tensors.sink.detach().double()[:, None]
        weight = (sink - lse)[..., None]
        noise = fine * (1 + sink.nan_to_num(neginf=0.0).abs() + lse.abs())[..., None]
        share_error = _share_error(weight, noise, torch.ones(())) + weight.exp() * own
        dots, slope = dout * out, (dout * out).sum(-1, keepdim=True) - dlse
        slope_error = own * abs(dlse) + (own * dots.abs() + dout.abs() * out_error).sum(-1, keepdim=True)
        bounds["dsink"] = (1 + own) * (share_error * slope.abs() + weight.exp() * slope_error).sum((0, 2, 3)) + least
    return bounds


def _share_error(share: Tensor, noise: Tensor, most: Tensor) -> Tensor:
    """Return the error of a share, given as its logarithm, by `noise` in the exponent, between 0 and `most`."""
    return torch.minimum(share + SEVERAL * noise + (-(-noise).expm1()).log(), most.log()).exp()


def _kept(problem: Problem) -> Tensor:
    dropout, rows = dropout_in(problem), torch.arange(problem.seq)
    return torch.ones(()) if dropout is None else dropout.kept(problem.heads, rows, rows, problem.batch) * dropout.factor


def _exact(problem: Problem, tensors: Tensors, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """`out` `(batch, heads, seq, head_dim)`, `lse` (0 where no key is seen), logarithms of shares, the count of keys, bias."""
    options = dict(is_causal=problem.is_causal, key_padding_mask=tensors.mask, scale=problem.scale, dropout=dropout_in(problem))
    options |= dict(bias=tensors.bias, softcap=problem.softcap or None)
    given = tensors.to("float64")
    out, lse = oracle_attention(*given.qkv, problem.pattern, sink=given.sink, **options)
    count = problem.pattern.count(problem.seq, problem.heads, kv_heads=problem.kv_heads, is_causal=problem.is_causal)
    if tensors.mask is not None:
        count = count * ~tensors.mask[:, None, None, :]
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    scores, rows, added = problem.scale * q @ k.mT, torch.arange(problem.seq), torch.zeros(())
    if problem.softcap:
        scores = problem.softcap * (scores / problem.softcap).tanh()
    if tensors.bias is not None:
        added = bias_of_rows(tensors.bias, rows, rows, problem.batch, torch.float64)
    inexact = SEVERAL * torch.finfo(torch.float64).eps * abs(problem.scale) * q.abs() @ k.abs().mT
    share = (scores + added - lse[..., None] + inexact).clamp(max=0.0) + count.log()  # the oracle adds up in another order
    return out.transpose(1, 2), lse, share, count, added
