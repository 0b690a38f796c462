"""The CPU kernel: all branches of a pattern in one pass, in C for each instruction set, on several threads.

A task is a query block of one head. Its rows fall into lists that the same branches and segments keep. A list runs one online
softmax over its keys, tile by tile; each key is scored once, with `+ log` of how many branches see it. See docs/cpu-kernel.md.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from dilkit import environment, plan
from dilkit.backend import Backend, Limits, Refusal, missing_modules
from dilkit.backends.native.branches import (
    MOST_TOKENS,
    MOST_WINDOW,
    branch_arrays,
    given_branch,
    kernel_branches,
    residue_classes,
    widest_window,
)
from dilkit.bias.form import BIASES, METRICS
from dilkit.inputs import Inputs
from dilkit.pattern.lowering import FORMS, GIVEN_FORMS, Band, Form, Grid, Segments
from dilkit.pattern.runs import UNBOUNDED
from dilkit.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.backends.native._native import EncodedProblem
    from dilkit.backends.native.branches import BranchArrays
    from dilkit.backends.native.given import GivenTables
    from dilkit.decoding.protocol import Step

    EncodedScores = tuple[float, int, int, bool, tuple[int, int, int]]
    EncodeArguments = tuple[tuple[int, ...], int, bool, bool, float, BranchArrays, EncodedScores, int, bool]

NO_BIAS, TABLE, AXIS_TABLES, ROW_TABLES = 0, 4, 5, 6
"""Inputs of a bias, besides the metrics from 1 on: kernels/native.h."""
MOST_ENTRIES = 2**31
"""Numbers of a bias by query, of a head of a sequence: kernels count them in 32 bits."""
MAX_BRANCHES = 64
"""Branches of a pattern: a set of them is the bits of a machine word."""
BLOCK_ROWS = 2048
"""Rows of a block, at most. Scratch grows with it, and keys are packed less often."""
ROW_STEP = 48
"""The rows of the widest tile: blocks that end at no segment's end have a multiple of it."""
CHUNK_ROWS = 4096
"""The gradients cut a sequence into chunks of so many rows, at least; shorter chunks are slower."""
FLOPS_PER_THREAD = 2**22
"""One more thread for each: to start a thread takes as long as to compute these."""

NOT_BUILT = Refusal(
    "kernel", "native", "this installation was built without it; on Windows it always is", "sdpa computes the same"
)


class Native(Backend):
    """One fused kernel for every pattern. `DILKIT_CPU_ISA` names the instruction set, by default the best of this machine."""

    name = "native"
    summary = "our C kernel, all branches in one pass: CPU"
    requires = ("torch",)
    limits = Limits(
        devices=frozenset({"cpu"}),
        varlen=True,
        kv_cache=True,
        query_offset=True,
        stored=frozenset({*DTYPES, "int8"}),
        dropout=True,
        softcap=True,
        biases=frozenset(BIASES),
        forms=FORMS | GIVEN_FORMS,
    )
    priority = 20
    reproducible = True

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        if not is_built():
            return (NOT_BUILT,)
        if problem.stored:
            return super().refusals(problem)
        return (*super().refusals(problem), *_pattern_refusals(problem))

    def detail(self, problem: Problem) -> str:
        name = instruction_set()
        return name if problem.dtype == "bfloat16" or name not in environment.BF16_SETS else "avx512"

    def encode(self, problem: Problem) -> EncodedCall:
        # A problem has no length where sequences have their own: packings of the same pattern share what is encoded.
        sizes = problem.batch, _seq(problem), problem.heads, problem.kv_heads, problem.head_dim
        is_square, evaluated = problem.queries is None, problem.span if problem.pattern.is_evaluated else 0
        options = problem.dtype, problem.is_causal, problem.scale, problem.kv_cache, problem.softcap, problem.bias, is_square
        key = "native", problem.pattern, sizes, options, evaluated
        return EncodedCall(plan.cached(key, _encode, problem), problem.flops())

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        query, key, value, mask, cu_seqlens, cache_seqlens, dropout, bias = inputs[:8]
        encoded, isa, threads = _prepared(problem, query)
        results: tuple[Tensor, Tensor]
        if cache_seqlens is None:
            if cu_seqlens is not None and problem.queries is None:
                _check_lengths(problem, cu_seqlens.diff())
            # No call of a function here or in `Inputs`: a small forward takes microseconds.
            tables = None if inputs.intervals is None and inputs.block_layout is None else _tables(inputs, problem, by_key=False)
            positions = None if problem.queries is None else _positions(inputs, problem)
            options = mask, cu_seqlens, dropout, bias, tables, positions
            results = _kernel().forward(encoded, isa, threads, query, key, value, *options)
        else:
            _check_lengths(problem, cache_seqlens)
            results = _kernel().forward_last(encoded, isa, threads, query, key, value, cache_seqlens, bias)
        return results

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        query, key, value, mask, cu_seqlens, _, dropout, bias = inputs[:8]
        tables = None if inputs.given is None else _tables(inputs, problem, by_key=True)
        options = mask, cu_seqlens, dropout, bias, tables, None if problem.queries is None else _positions(inputs, problem)
        *sums, parts = _kernel().backward(*_prepared(problem, query), dout, query, key, value, out, lse.contiguous(), *options)
        if query.dtype != lse.dtype:  # sums lie head by head
            from torch import contiguous_format

            sums = [x.to(query.dtype, memory_format=contiguous_format) for x in sums]
        return tuple(sums) if parts is None else (*sums, parts.sum(0).to(lse.dtype))

    def attend_stored(self, step: Step, problem: Problem) -> tuple[Tensor, Tensor]:
        import torch

        options = _encode_scores(problem), instruction_set(), torch.get_num_threads()
        stored: tuple[Tensor, Tensor] = _kernel().attend_stored(step, problem, *options)
        return stored


def _pattern_refusals(problem: Problem) -> list[Refusal]:
    forms, refusals = problem.forms, []
    if (branches := len(kernel_branches(forms))) > MAX_BRANCHES:
        refusals.append(Refusal("branches", str(branches), f"at most {MAX_BRANCHES}"))
    in_numbers = problem.pattern.overlap == "once" or any(isinstance(form, Grid) for form in forms)
    if in_numbers and problem.span > MOST_TOKENS and not all(isinstance(form, Segments) for form in forms):
        refusals.append(Refusal("seq", f"{problem.seq:,}", f"at most {MOST_TOKENS:,} on a grid, or for a mix that counts once"))
    if problem.queries is not None:
        refusals += _queries_refused(problem)
    if problem.bias is not None and problem.bias.by_query and problem.span * problem.bias.entries >= MOST_ENTRIES:
        numbers = f"{problem.span * problem.bias.entries:,} numbers of a head"
        refusals.append(Refusal("bias", numbers, f"fewer than {MOST_ENTRIES:,}", 'backend="reference"'))
    left_out = (forms[at] for form in forms for at in form.without)
    if any(isinstance(other, Band) and (other.begin or other.back != other.ahead) for other in left_out):
        limit = 'overlap="once" cannot subtract a band with a minimum distance or unequal reach'
        refusals.append(Refusal("overlap", "'once'", limit, 'overlap="count", or backend="reference"'))
    if any(_differ_in_left_out(one, other) for one, other in combinations(forms, 2)):
        limit = "segments of a head without the same rows and columns"  # they share their keys' scores
        refusals.append(Refusal("pattern", "segments that differ in those", limit, 'backend="reference"'))
    if (window := widest_window(problem)) > MOST_WINDOW:
        refusals.append(Refusal("window", f"{window:,}", f"at most {MOST_WINDOW:,}, or the whole sequence"))
    return refusals


def _queries_refused(problem: Problem) -> list[Refusal]:
    """Refuse query positions that the kernel cannot represent where query i is not key i."""
    offset, hint = problem.query_offset or 0, 'backend="reference"'
    if any(isinstance(form, Grid) for form in problem.forms):
        return [Refusal("queries", f"{problem.queries:,}", "a grid has as many queries as keys", hint)]
    if offset < 0 and not problem.is_causal and not _by_distance(problem):
        return [Refusal("query_offset", str(offset), _FROM_0, hint)]
    return []


_FROM_0 = "from 0 on, unless is_causal=True or all branches are windows and strides"


def _by_distance(problem: Problem) -> bool:
    return all(isinstance(form, Band) for form in problem.forms)


def _differ_in_left_out(one: Form, other: Form) -> bool:
    """True for segments of a head of which not all leave out the same rows and columns."""
    if not (isinstance(one, Segments) and isinstance(other, Segments)):
        return False
    left_out = ([None if runs is None else runs.tobytes() for runs in (x.without_rows, x.without_columns)] for x in (one, other))
    meet = one.heads[0] < other.heads[1] and other.heads[0] < one.heads[1]
    return meet and next(left_out) != next(left_out)


def _positions(inputs: Inputs, problem: Problem) -> tuple[Tensor | None, Tensor | None, int | None]:
    """Return where keys begin, and the position of the first query, of each sequence or of all.

    Raises ValueError for positions that the kernel, or a branch, has not.
    """
    starts, starts_k, offsets = inputs.cu_seqlens, inputs.cu_seqlens_k, inputs.query_offset
    if starts is None and offsets is None:
        return None, None, problem.query_offset
    import torch

    rows, keys = (
        torch.tensor([x.shape[1]]) if begin is None else begin.diff().long()
        for x, begin in ((inputs.query, starts), (inputs.key, starts if starts_k is None else starts_k))
    )
    first = keys - rows if problem.is_causal else torch.zeros_like(keys)
    if offsets is not None:
        first, hint = offsets.long(), "or backend='reference'"
        if not problem.is_causal and bool((first < 0).any()) and not _by_distance(problem):
            raise ValueError(f"query_offset has {int(first.min())}; {_FROM_0}, {hint}")
        reaches = [reach for form in problem.forms if isinstance(form, Band) for reach in (form.back, form.ahead)]
        bounded = problem.pattern.is_evaluated or any(MOST_WINDOW < reach < UNBOUNDED for reach in reaches)
        if bounded and int((first + rows).max()) > problem.span:
            limit = f"positions below {problem.span:,} are needed for this pattern"
            raise ValueError(f"query_offset has {int(first.max())}; {limit}, {hint}")
    if not problem.pattern.only_segments:
        ends = torch.maximum(keys, first + rows).where(rows > 0, keys)
        for end in sorted(set(ends.tolist()) - {0}):
            problem.pattern.check_seq(end)
    return starts_k, offsets, None


def _check_lengths(problem: Problem, lengths: Tensor) -> None:
    if not problem.pattern.only_segments:
        for length in sorted(set(lengths.tolist()) - {0}):
            problem.pattern.check_seq(length)


def is_built() -> bool:
    """True if the compiled kernel is installed."""
    return not missing_modules((f"{__package__}._native",))


@cache
def _kernel() -> ModuleType:
    from dilkit.backends.native import _native

    return _native


@cache
def _instruction_sets() -> tuple[str, ...]:
    names: tuple[str, ...] = _kernel().instruction_sets()
    return names


def instruction_set() -> str:
    """Return the instruction set that the kernel runs: `DILKIT_CPU_ISA` if set, else the best of this machine."""
    return environment.cpu_isa(_instruction_sets())


class EncodedCall(NamedTuple):
    """A problem as the kernel takes it, and its FLOPs."""

    problem: EncodedProblem
    flops: int

    @property
    def nbytes(self) -> int:
        """Bytes of its tables."""
        return self.problem.nbytes


def _prepared(problem: Problem, query: Tensor) -> tuple[EncodedProblem, str, int]:
    """Return the first arguments of the kernel: the encoded problem, the instruction set and the number of threads.

    In a packed call each row has the work of one of the longest sequence, at most.
    """
    encoded, flops = problem.encoded or Native().encode(problem)
    if problem.varlen or problem.kv_cache:
        flops = flops * query.shape[1] // (problem.queries or problem.seq)
    threads = 1
    if flops >= FLOPS_PER_THREAD:
        import torch

        threads = min(torch.get_num_threads(), 1 + flops // FLOPS_PER_THREAD)
    return encoded, environment.cpu_isa(_instruction_sets()), threads


def _seq(problem: Problem) -> int:
    return 0 if problem.varlen or problem.kv_cache or problem.queries is not None else problem.seq


def _encode(problem: Problem) -> EncodedProblem:
    encoded: EncodedProblem = _kernel().EncodedProblem(*encode_problem(problem))
    return encoded


def encode_problem(problem: Problem) -> EncodeArguments:
    """Return the arguments of `_native.EncodedProblem`."""
    sizes = problem.heads, problem.kv_heads, problem.head_dim
    return (
        (problem.batch, _seq(problem), *sizes, BLOCK_ROWS, ROW_STEP, CHUNK_ROWS, residue_classes(problem)),
        DTYPES.index(problem.dtype),
        problem.is_causal,
        problem.pattern.overlap == "once",
        problem.scale,
        branch_arrays(problem),
        _encode_scores(problem),
        given_branch(problem.forms),
        problem.queries is None,
    )


def _tables(inputs: Inputs, problem: Problem, by_key: bool) -> GivenTables:
    from dilkit.backends.native.given import given_tables

    return given_tables(inputs, problem, by_key)


def _encode_scores(problem: Problem) -> EncodedScores:
    """Return the softcap and of the bias: its kind, numbers of a position, True if a row has two, sizes of its table."""
    form = problem.bias
    if form is None:
        return problem.softcap, NO_BIAS, 0, False, (1, 1, 1)
    kind = METRICS.index(form.metric) + 1
    if form.sizes:
        kind = ROW_TABLES if form.by_query else AXIS_TABLES if form.by_axis else TABLE
    a, b, c = (*form.sizes, 1, 1, 1)[:3]  # dimensions that a table has not are the last ones, in which all positions are 0
    return problem.softcap, kind, form.dims, form.apart, (a, b, c)
