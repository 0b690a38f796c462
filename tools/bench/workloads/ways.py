"""Ways to compute attention that suites time beside each other: the CPU kernel, and torch with a matrix of all pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilkit import CoordinateAlibi, dilated_attention
from dilkit.bias.base import Bias
from dilkit.pattern import BlockSparse, Pattern
from dilkit.problem import Problem
from dilkit.testing.accuracy import Check, Results, differentiated, expected, expected_rows, shortened
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.baselines import merged
from dilkit.tools.measure.case import CaseFields, failed
from dilkit.tools.measure.ceilings import MultiplyAdds
from dilkit.tools.measure.correctness import some_rows
from dilkit.tools.measure.flex import FLEX
from dilkit.tools.measure.timing import Call, SingleCall, call_once, time_interleaved
from dilkit.tools.results.record import Entries, Entry
from dilkit.tools.results.rows import Row, rows_of

BACKEND = "native"


@dataclass(frozen=True)
class Way:
    """One way to compute `problem` on `inputs`.

    Attributes:
        attend: function of query, key, value, mask and a bias; returns out and lse, or an empty tensor in its place.
        held_bytes: memory of what it needs besides the inputs, such as a matrix.
        refusals: reasons why it cannot run here.
        make: function that makes the same way for a shorter problem, which is then compared as a whole.
    """

    problem: Problem
    inputs: Tensors
    attend: Callable[..., Any]
    held_bytes: int = 0
    refusals: tuple[str, ...] = ()
    make: Callable[[Problem, Tensors], Way] | None = None

    def __call__(self) -> Results:
        with torch.set_grad_enabled(self.problem.requires_grad):
            return differentiated(self.attend, self.inputs, self.problem.requires_grad)


MakeWay = Callable[[Problem, Tensors], Way]


def native(problem: Problem, inputs: Tensors) -> Way:
    """The CPU kernel, all branches in one pass."""
    options: dict[str, Any] = dict(is_causal=problem.is_causal, softcap=problem.softcap or None, backend=BACKEND, return_lse=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None, **arguments: Any) -> Any:
        return dilated_attention(q, k, v, problem.pattern, **arguments, **options)

    return Way(problem, inputs, attend, make=native)


def one_by_one(problem: Problem, inputs: Tensors) -> Way:
    """A call of the CPU kernel for each branch; the results are merged by their logsumexps, in torch."""
    alone = [native(replace(problem, pattern=Pattern.of(branch)), inputs) for branch in problem.pattern.branches]

    def attend(*rows: Any) -> Any:
        outs, lses = zip(*(way.attend(*rows) for way in alone), strict=True)
        return merged(outs, lses), rows[0].new_empty(0)

    return Way(problem, inputs, attend, make=one_by_one)


def flex(problem: Problem, inputs: Tensors) -> Way:
    """torch's FlexAttention, compiled for this shape alone; it looks only at blocks in which a pair is seen."""
    refusals = tuple(FLEX.refusals(problem))
    return Way(problem, inputs, lambda *rows: (FLEX.attend(inputs, problem), inputs.query.new_empty(0)), refusals=refusals)


def masked(problem: Problem, inputs: Tensors) -> Way:
    """torch's attention with a mask of all pairs, made before it is timed; the pattern is one `BlockSparse`, not causal."""
    branch = block_list(problem)
    # Of four dimensions, or torch computes without its fused kernel.
    mask = blocks_seen(problem)[None, None]
    for dim in (2, 3):
        mask = mask.repeat_interleave(branch.block_size, dim).narrow(dim, 0, problem.seq)
    return Way(problem, inputs, lambda *rows: by_torch(rows, mask), held_bytes=mask.nbytes)


def with_matrix(problem: Problem, inputs: Tensors) -> Way:
    """torch's attention with the bias of all pairs, which the call makes; the pattern is dense, not causal."""
    return Way(problem, inputs, lambda *rows, bias: by_torch(rows, _matrix(bias)), make=with_matrix)


def with_given_matrix(problem: Problem, inputs: Tensors) -> Way:
    """The same with a matrix that was made before, as for further layers of a model."""
    assert inputs.bias is not None
    matrix = _matrix(inputs.bias)
    attend = lambda *rows, bias: by_torch(rows, matrix)  # noqa: E731
    return Way(problem, inputs, attend, held_bytes=matrix.nbytes, make=with_given_matrix)


def eager(problem: Problem, inputs: Tensors) -> Way:
    """Causal attention with a softcap, operator by operator, as models write it out."""
    group = problem.heads // problem.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: None) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)))
        scores = torch.tanh(q @ k.mT * problem.scale / problem.softcap) * problem.softcap
        later = torch.full((problem.seq, problem.seq), -math.inf, dtype=scores.dtype).triu(1)
        out = ((scores + later).softmax(-1) @ v).transpose(1, 2)
        return out, out.new_empty(0)

    return Way(problem, inputs, attend, make=eager)


def by_torch(rows: Sequence[Any], matrix: Tensor) -> Any:
    """torch's attention with a matrix that is added to the scores, or a mask of the pairs that are seen."""
    q, k, v = (x.transpose(1, 2) for x in rows[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, matrix).transpose(1, 2)
    return out, out.new_empty(0)


def _matrix(bias: Bias) -> Tensor:
    """`(batch, heads, seq, seq)`, of distances by torch's own function for them."""
    assert isinstance(bias, CoordinateAlibi)
    exact = "donot_use_mm_for_euclid_dist"  # by its products distances have half the digits
    apart = torch.cdist(bias.coordinates, bias.coordinates, compute_mode=exact)
    return -bias.slopes[:, None, None] * apart.unsqueeze(1)


def block_list(problem: Problem) -> BlockSparse:
    """The only branch of the pattern."""
    (branch,) = problem.pattern.branches
    if not isinstance(branch, BlockSparse):
        raise TypeError(f"pattern {problem.pattern}: a BlockSparse is needed")
    return branch


def blocks_seen(problem: Problem) -> Tensor:
    """Blocks that its block list shows, the same for all heads: bool `(blocks, blocks)`, of as many as the sequence has."""
    branch = block_list(problem)
    blocks = -(-problem.seq // branch.block_size)
    return torch.from_numpy(branch.own_layout.array()[0, :blocks, :blocks].copy())


def case_rows(table: str, what: str, ways: Mapping[str, Way], repeats: int, **facts: Any) -> list[Row]:
    """The rows of a case `what` with further facts: the ways compared with the definition, then timed in turns."""
    problems = {name: dict(problem=str(way.problem)) for name, way in ways.items()}
    return rows_of(table, dict(what=what, **facts), compared(ways, repeats), problems)


def compared(ways: Mapping[str, Way], repeats: int) -> CaseFields:
    """Compare each way with the definition, then time those that are right in turns, beside multiply-adds."""
    return timed({name: _admitted(way) for name, way in ways.items()}, ways, repeats)


def checked(check: Check | None, one: SingleCall | None = None) -> Entry:
    """The entry of an implementation before it is timed: its verdict, and if it is right the memory of `one` call."""
    if check and not check.passed:
        return Entry(verdict="wrong", reasons=(check.complaint,), check=(check,))
    checks = (check,) if check else ()
    return Entry(check=checks, peak_bytes=one.peak_bytes if one else None, memory_note=one.why if one else None)


def _admitted(way: Way) -> Entry:
    """The entry of a way before it is timed: its verdict, and the memory of a call."""
    if way.refusals:
        return Entry(verdict="refused", reasons=way.refusals)
    try:
        checks = (*_whole_checks(way), *_row_checks(way))
        if wrong := next((check for check in checks if not check.passed), None):
            return Entry(verdict="wrong", reasons=(wrong.complaint,), check=(wrong,))
        one = call_once(way.__call__)
    except Exception as error:  # out of memory, a kernel that cannot be compiled: the others go on
        return failed(error)
    peak = None if one.peak_bytes is None else one.peak_bytes + way.held_bytes
    held = None if peak is None else peak + sum(x.nbytes for x in way.inputs.qkv)
    flops = float(way.problem.flops())
    return Entry(check=checks, flops=flops, peak_bytes=peak, memory_bytes=held, memory_note=one.why)


def _whole_checks(way: Way) -> tuple[Check, ...]:
    """Compare all results at a length at which the oracle has room."""
    if way.make is None:
        return ()
    problem = shortened(way.problem)
    short = way.make(problem, Tensors.random(problem, seed=1))
    results = {name: x for name, x in short().items() if x.numel()}
    return expected(problem, short.inputs).checks(results, problem.seq)


def _row_checks(way: Way) -> tuple[Check, ...]:
    """Compare the first row, a global token where there are some, and random others at full length."""
    rows = some_rows(way.inputs, way.problem)
    rows = torch.cat([rows.new_zeros(1), rows])
    results = {name: x[:, rows] for name, x in way().items() if name in ("out", "dq")}
    return expected_rows(way.problem, way.inputs, rows).checks(results, way.problem.seq, " rows")


def timed(entries: Entries, calls: Mapping[str, Call], repeats: int, before: Call | None = None) -> CaseFields:
    """`entries` with times, beside multiply-adds in the same rounds; `before` comes before each sample, untimed."""
    ceiling, able = MultiplyAdds(), {name: call for name, call in calls.items() if entries[name].verdict == "measured"}
    samples = time_interleaved({**ceiling.calls, **able}, repeats, warmup=0, before=before)
    return CaseFields(
        **ceiling.rates(samples), entries={name: replace(entry, time=samples.get(name)) for name, entry in entries.items()}
    )
