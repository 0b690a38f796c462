"""The tolerance of results: the one rule of the conformance suite, benchmarks and ranks.

    allowed = limit * (max|plain - exact| + a few roundings)        limit: 2, for gradients 3

`exact` is the oracle in fp64, `plain` the same in the dtype of the tensors, which may hit a value exactly where others round.
The oracle has no room for a long problem: that is checked `shortened`, and in some rows at its real length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilkit import oracle
from dilkit.bias.base import Bias
from dilkit.op.dropout import Dropout, draw_seed
from dilkit.pattern import Branch, DilatedSegment, Neighborhood
from dilkit.problem import Problem
from dilkit.testing.biases import largest_distance
from dilkit.testing.check import Check as Check
from dilkit.testing.tensors import Tensors

Results = dict[str, Tensor]
"""`out`, `lse`, `dq`, `dk`, `dv`, `dsink` and `dbias`, or some of them, by name."""
LIMITS = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0, "dsink": 3.0, "dbias": 3.0}
DROPOUT_SEED = 7
SHORT, WIDE, KEYS = 512, 8, 8
"""Tokens of a shortened problem, at most; heads in all sequences beyond which there are fewer; keys that segments keep."""


@dataclass(frozen=True)
class Expected:
    """Results in fp64, and the error that plain torch math makes in each of them, a few roundings added."""

    exact: Results
    error: dict[str, float]

    @classmethod
    def of(cls, compute: Callable[[str], Results], problem: Problem, tensors: Tensors) -> Expected:
        """Compute the results in fp64, and the error of plain torch math, by `compute(dtype)`, the definition in that dtype."""
        single = "float32" if problem.dtype == "float64" else problem.dtype
        exact, plain = compute("float64"), compute(single)
        # fp64 is the oracle's own dtype: the error of plain torch math is that of fp32, scaled down.
        shrink = torch.finfo(getattr(torch, problem.dtype)).eps / torch.finfo(getattr(torch, single)).eps
        tiny, errors = _few_roundings(problem, tensors, single, exact), {n: distance(plain[n], x) for n, x in exact.items()}
        # Arithmetic so coarse that it fails by itself is no yardstick.
        return cls(exact, {n: shrink * (tiny[n] + (error if math.isfinite(error) else 0.0)) for n, error in errors.items()})

    def checks(self, found: Results, seq: int, where: str = "") -> tuple[Check, ...]:
        """Return one check of each result in `found`, whose name is followed by `where`."""
        return tuple(
            Check.of(f"{name}{where}", seq, distance(x, self.exact[name]), self.error[name], LIMITS[name] * self.error[name])
            for name, x in found.items()
        )


def expected(
    problem: Problem, tensors: Tensors, lengths: Sequence[int] = (), last: int = 0, key_lengths: Sequence[int] = ()
) -> Expected:
    """Compute the expected results on `tensors`: `out` and `lse`, with gradients where the problem asks for them.

    `lengths`: of the sequences of a packed call, or in a cache, of which the `last` rows are computed; `key_lengths`: of other
    keys.
    """
    return Expected.of(partial(definition, problem, tensors, lengths, last, key_lengths=key_lengths), problem, tensors)


def definition(
    problem: Problem,
    tensors: Tensors,
    lengths: Sequence[int],
    last: int,
    dtype: str = "float64",
    key_lengths: Sequence[int] = (),
) -> Results:
    """Compute the definition with all arithmetic in `dtype`; the other arguments are those of `expected`."""
    options: dict[str, Any] = dict(is_causal=problem.is_causal, scale=problem.scale, dtype=dtype, dropout=dropout_in(problem))
    options["softcap"] = problem.softcap or None
    options |= tensors.given

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor | None = None, bias: Bias | None = None
    ) -> tuple[Tensor, Tensor]:
        if last:
            return oracle.oracle_attention_last(q, k, v, problem.pattern, lengths, last, sink=sink, bias=bias, **options)
        if lengths:
            options["key_lengths"] = key_lengths
            return oracle.oracle_attention_varlen(q, k, v, problem.pattern, lengths, sink=sink, bias=bias, **options)
        options["query_offset"] = problem.query_offset
        return oracle.oracle_attention(q, k, v, problem.pattern, key_padding_mask=mask, sink=sink, bias=bias, **options)

    return differentiated(attend, tensors.to(dtype), problem.requires_grad)


def dropout_in(problem: Problem) -> Dropout | None:
    """Return the dropout of calls of `problem` within `seeded`; None where the problem has none."""
    if not problem.dropout_p:
        return None
    seed = int(draw_seed(torch.Generator().manual_seed(DROPOUT_SEED)))
    return Dropout(problem.dropout_p, seed, first_head=problem.first_head)


@contextmanager
def seeded() -> Iterator[None]:
    """Within the block, the next call with dropout has the seed of `dropout_in`."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(DROPOUT_SEED)
        yield


def expected_rows(problem: Problem, tensors: Tensors, rows: Tensor) -> Expected:
    """Compute the expected `out` and `lse` of some rows, and `dq` where the problem asks for gradients, at any length."""
    return Expected.of(partial(exact_rows, problem, tensors, rows), problem, tensors)


def exact_rows(problem: Problem, tensors: Tensors, rows: Tensor, dtype: str = "float64") -> Results:
    """Compute `out`, `dq` `(batch, rows, heads, head_dim)` and `lse` `(batch, heads, rows)` of the queries in `rows`, by head."""
    kind, group = getattr(torch, dtype), problem.heads // problem.kv_heads
    count = problem.pattern.count_rows(rows, problem.seq, problem.heads, kv_heads=problem.kv_heads, is_causal=problem.is_causal)
    zeros = oracle.zero_keys(problem.pattern, rows, problem.seq, problem.heads, problem.kv_heads, problem.is_causal)
    dropout, keys = dropout_in(problem), torch.arange(problem.seq, device=rows.device)
    scaled = None if dropout is None else dropout.kept(problem.heads, rows, keys, problem.batch).to(kind) * dropout.factor
    added = None if tensors.bias is None else oracle.bias_of_rows(tensors.bias, rows, keys, problem.batch, kind)
    rows_by_name: dict[str, list[Tensor]] = dict(out=[], lse=[], **(dict(dq=[]) if problem.requires_grad else {}))
    for head in range(problem.heads):
        query = tensors.query.detach()[:, rows, head].to(kind).requires_grad_(problem.requires_grad)
        key, value = (x.detach()[:, :, head // group].to(kind) for x in (tensors.key, tensors.value))
        seen = count[head][None] if tensors.mask is None else count[head] * ~tensors.mask[:, None, :]
        sink = None if tensors.sink is None else tensors.sink.detach()[head : head + 1]
        inputs = oracle.with_zero_keys(key, value, seen, None if zeros is None else zeros[head])
        factors, bias = (None if x is None else x[:, head] for x in (scaled, added))
        out, lse = oracle.softmax_of_count(query, *inputs, problem.scale, sink, factors, bias, problem.softcap or None)
        if problem.requires_grad:
            rows_by_name["dq"] += torch.autograd.grad(out, query, tensors.dout[:, rows, head].to(kind))
        rows_by_name["out"].append(out.detach())
        rows_by_name["lse"].append(lse.detach().expand(problem.batch, len(rows)))
    return {name: torch.stack(parts, 1 if name == "lse" else 2) for name, parts in rows_by_name.items()}


def differentiated(attend: Callable[..., Any], tensors: Tensors, gradients: bool) -> Results:
    """Compute `attend(q, k, v, mask[, sink][, bias=])`, with `gradients` its gradients, through `lse` too beside a `dlse`."""
    leaves = dict(zip(("dq", "dk", "dv", "dsink"), (*tensors.qkv, tensors.sink), strict=True))
    leaves["dbias"] = None if tensors.bias is None else tensors.bias.weights
    inputs = {name: x.detach().requires_grad_(gradients) for name, x in leaves.items() if x is not None}
    options: dict[str, Any] = {}
    if tensors.bias is not None:
        options["bias"] = tensors.bias.with_weights(inputs["dbias"])
    sinks = [inputs["dsink"]] if "dsink" in inputs else []
    out, lse = attend(inputs["dq"], inputs["dk"], inputs["dv"], tensors.mask, *sinks, **options)
    results = dict(out=out.detach(), lse=lse.detach())
    if gradients:
        outputs, incoming = [out], [tensors.dout]
        if tensors.dlse is not None:
            outputs, incoming = [out, lse], [tensors.dout, tensors.dlse.to(lse.dtype)]
        results |= zip(inputs, torch.autograd.grad(outputs, list(inputs.values()), incoming), strict=True)
    return results


def distance(result: Tensor, exact: Tensor) -> float:
    """Return the largest |result - exact|; infinite where one is finite and the other not, or of another sign of infinity."""
    wide = result.detach().double().to(exact.device)
    return torch.where(wide == exact, 0.0, (wide - exact).abs()).nan_to_num(nan=math.inf).max().item()


def _few_roundings(problem: Problem, tensors: Tensors, dtype: str, exact: Results) -> dict[str, float]:
    """Return an absolute error of a rounding or two in the accumulating dtype and one half in the result's, `dtype`.

    The accumulating dtype is fp32 for half types. A gradient of scores is the difference of two terms as large as |dout| . |v|. A
    score and its lse are rounded by themselves: `exp(score - lse)` has a relative error of about `eps * |lse|`.
    """
    q, k, v, dout = (x.detach().abs().nan_to_num(0.0) for x in (*tensors.qkv, tensors.dout))
    largest = {name: x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0 for name, x in exact.items()}
    means = dout.mean(dtype=torch.float64) * v.mean(dtype=torch.float64)
    difference = 2 * abs(problem.scale) * means.item() * problem.head_dim
    most_q, most_k, most_v, most_dout = (x.max().item() for x in (q, k, v, dout))
    natural = dict(out=most_v, lse=1.0, dq=difference * most_k, dk=difference * most_q, dv=most_dout)
    natural["dsink"] = problem.batch * problem.seq * means.item() * problem.head_dim  # if each row looked at the sink alone
    if tensors.bias is not None:
        rows = problem.batch * problem.seq if tensors.bias.by_query else 1
        natural["dbias"] = natural["dsink"] / rows * largest_distance(tensors.bias, problem.seq)
    accumulating, result = torch.finfo(torch.float32).eps, torch.finfo(getattr(torch, dtype)).eps
    accumulating *= max(1.0, largest["lse"])
    return {name: accumulating * natural[name] + result / 2 * size for name, size in largest.items()}


def shortened(problem: Problem) -> Problem:
    """Return `problem` with lengths divided by a power of two to at most `SHORT` tokens, and matrices as of `WIDE` heads.

    Rates stay, and a segment keeps `KEYS` of its keys, as with one no query has a gradient. Several grids stay as they are.
    """
    grids = [branch for branch in problem.pattern.branches if isinstance(branch, Neighborhood)]
    if len({grid.shape for grid in grids}) > 1:
        return problem
    most = SHORT * min(1.0, math.sqrt(WIDE / (problem.batch * problem.heads)))
    divisor = 1 << max(0, math.ceil(math.log2(max(problem.seq, 1) / most)))
    shape = _smaller_grid(grids, problem.seq // divisor) if grids else (problem.seq // divisor,)
    branches = (_shortened(branch, problem.seq, divisor, shape) for branch in problem.pattern.branches)
    return replace(problem, seq=math.prod(shape), pattern=problem.pattern.with_branches(*branches))


def _smaller_grid(grids: Sequence[Neighborhood], tokens: int) -> tuple[int, ...]:
    shape, dimensions = list(grids[0].shape), range(len(grids[0].shape))
    least = [max(grid.kernel_size[i] * grid.dilation[i] for grid in grids) for i in dimensions]
    while math.prod(shape) > tokens and (wide := [i for i in dimensions if shape[i] > least[i]]):
        longest = max(wide, key=lambda i: shape[i])
        shape[longest] = max(least[longest], shape[longest] // 2)
    return tuple(shape)


def _shortened(branch: Branch, seq: int, divisor: int, shape: tuple[int, ...]) -> Branch:
    if isinstance(branch, Neighborhood):
        return replace(branch, shape=shape)
    if not isinstance(branch, DilatedSegment):
        return branch
    w, rate = branch.segment_length, branch.dilation_rate
    return replace(branch, segment_length=max(rate, min(w, KEYS * rate), min(w, seq) // divisor))
