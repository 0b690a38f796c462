"""The CPU kernel: all branches of a pattern in one pass, in C for each instruction set, on several threads.

A task is a query block of one head: up to `BLOCK_ROWS` consecutive rows. Its rows fall into lists that see the same keys: rows
that the same branches and segments keep. A list runs one online softmax over its keys, tile by tile; each key is scored once,
with `+ log` of how many branches see it. Nothing grows with the number of branches. docs/cpu-kernel.md explains it.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from dilkit import environment, plan
from dilkit.backend import Backend, Limits, Refusal, missing_modules
from dilkit.problem import DTYPES, Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from dilkit.backends.native._native import EncodedProblem

    Int64Array = NDArray[np.int64]
    EncodeArguments = tuple[tuple[int, ...], int, bool, bool, float, Int64Array, Int64Array, Int64Array, NDArray[np.uint64]]

MAX_BRANCHES = 64
"""Branches of a pattern: a set of them is the bits of a machine word."""

BLOCK_ROWS = 2048
"""Rows of a block, at most. Scratch grows with it, and keys are packed less often."""

BLOCK_NUMBERS = 2**17
"""Rows times head_dim of a block, at most: what the cache of a core holds."""

ROW_STEP = 48
"""The rows of the widest tile: blocks that end at no segment's end have a multiple of it."""

MIN_TASKS = 64
"""Shorter problems are cut into about as many blocks, so that every core gets some."""

SHORT_BLOCK_ROWS = 192
"""But not into blocks of fewer rows: packing the keys takes longer then."""

CHUNK_ROWS, MAX_CHUNKS = 8192, 16
"""The fused gradients cut a sequence into chunks of so many rows, and into no more chunks; shorter chunks are slower."""

PARALLEL_TASKS = 32
"""Chunks times key/value heads that can run side by side, even if that takes shorter chunks."""

MIN_SHARED_ROWS = 32
"""Rows that a branch keeps, at least, of a segment of the branches that it shares scores with; with fewer it runs on its own."""

FLOPS_PER_THREAD = 2**22
"""One more thread for each: to start a thread takes as long as to compute these."""


NOT_BUILT = Refusal(
    "kernel", "native", "this installation was built without it, as on Windows it always is", "sdpa computes the same"
)


class Native(Backend):
    """One fused kernel for every pattern. `DILKIT_CPU_ISA` names the instruction set, by default the best of this machine."""

    name = "native"
    summary = "our C kernel, all branches in one pass: CPU"
    requires = ("torch",)
    limits = Limits(devices=frozenset({"cpu"}))
    priority = 20
    reproducible = True

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        if not is_built():
            return (NOT_BUILT,)
        branches = len(problem.pattern.branches)
        if branches <= MAX_BRANCHES:
            return super().refusals(problem)
        return (*super().refusals(problem), Refusal("branches", str(branches), f"at most {MAX_BRANCHES}"))

    def detail(self, problem: Problem) -> str:
        name = instruction_set()
        return name if problem.dtype == "bfloat16" or name not in environment.BF16_SETS else "avx512"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        import torch

        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = query.new_empty(problem.batch, problem.heads, problem.seq, dtype=dtype)
        tensors = query, key, value, out, lse, key_padding_mask
        _kernel().forward(_encoded(problem), instruction_set(), _threads(problem), *tensors)
        return out, lse

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        lse, plain = lse.contiguous(), torch.contiguous_format
        dq = torch.zeros_like(query, memory_format=plain)
        dk = torch.zeros_like(key, memory_format=plain)
        dv = torch.zeros_like(value, memory_format=plain)
        tensors = dout, query, key, value, out, lse, key_padding_mask, dq, dk, dv, torch.empty_like(lse)
        _kernel().backward(_encoded(problem), instruction_set(), _threads(problem), *tensors)
        return dq, dk, dv


def is_built() -> bool:
    """Whether the compiled kernel is there."""
    return not missing_modules((f"{__package__}._native",))


@cache
def _kernel() -> ModuleType:
    """The compiled kernel, imported when it is first used."""
    from dilkit.backends.native import _native

    return _native


@cache
def _instruction_sets() -> tuple[str, ...]:
    names: tuple[str, ...] = _kernel().instruction_sets()
    return names


def instruction_set() -> str:
    """The name of the instruction set that the kernel runs: that of `DILKIT_CPU_ISA`, else the best of this machine."""
    return environment.cpu_isa(_instruction_sets())


def _threads(problem: Problem) -> int:
    import torch

    return max(1, min(torch.get_num_threads(), 1 + problem.flops() // FLOPS_PER_THREAD))


def _encoded(problem: Problem) -> EncodedProblem:
    """`problem` as the C kernel reads it; made once and kept in the cache."""
    sizes = problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim
    options = problem.dtype, problem.is_causal, problem.scale
    return plan.cached(("native", problem.pattern.to_json(), sizes, options), _encode, problem)


def _encode(problem: Problem) -> EncodedProblem:
    encoded: EncodedProblem = _kernel().EncodedProblem(*encode_problem(problem))
    return encoded


def encode_problem(problem: Problem) -> EncodeArguments:
    """The arguments of `_native.EncodedProblem`: sizes, dtype, flags, scale, and the branches as arrays."""
    import numpy as np

    pattern, seq = problem.pattern, problem.seq
    return (
        (problem.batch, seq, problem.heads, problem.kv_heads, problem.head_dim, _block_rows(problem), *_chunks(problem)),
        DTYPES.index(problem.dtype),
        problem.is_causal,
        pattern.overlap == "once",
        problem.scale,
        np.array([min(branch.segment_length, seq) for branch in pattern.branches], np.int64),
        np.array([min(branch.dilation_rate, seq) for branch in pattern.branches], np.int64),
        np.array([_offsets(problem, head) for head in range(problem.heads)], np.int64),
        np.array(_branch_groups(problem), np.uint64),
    )


def _offsets(problem: Problem, head: int) -> list[int]:
    """The offset of each branch for a query head, -1 where the branch does not serve it."""
    pattern, kv_heads = problem.pattern, problem.kv_heads
    kv_head = head * kv_heads // problem.heads
    return [
        pattern.head_offset(branch.dilation_rate, kv_head, kv_heads) if branch.serves(head) else -1 for branch in pattern.branches
    ]


def _block_rows(problem: Problem) -> int:
    """Rows of a block: by the problem alone, so that results do not depend on the machine.

    Whole segments of the branch with the shortest ones, or an equal part of one: where a segment ends within a block, its keys
    are packed once more.
    """
    rows = max(problem.batch * problem.heads * problem.seq // MIN_TASKS, SHORT_BLOCK_ROWS)
    rows = max(min(rows, BLOCK_ROWS, BLOCK_NUMBERS // problem.head_dim), 1)
    segment = max(min(problem.seq, *(branch.segment_length for branch in problem.pattern.branches)), 1)
    if segment <= rows:
        return min(rows // segment, math.ceil(problem.seq / segment)) * segment
    rows = math.ceil(segment / math.ceil(segment / rows))
    return rows if segment < problem.seq else math.ceil(rows / ROW_STEP) * ROW_STEP


def _chunks(problem: Problem) -> tuple[int, int]:
    """The number of chunks that the fused gradients cut the sequence into, and their rows; (0, 0) where they are not fused."""
    if problem.dtype not in ("float32", "float64"):
        return 0, 0
    rows = _block_rows(problem)
    blocks = math.ceil(problem.seq / rows)
    wanted = max(problem.seq // CHUNK_ROWS, math.ceil(PARALLEL_TASKS / max(problem.batch * problem.kv_heads, 1)))
    per_chunk = math.ceil(blocks / min(wanted, MAX_CHUNKS))
    return math.ceil(blocks / max(per_chunk, 1)), per_chunk * rows


def _branch_groups(problem: Problem) -> list[int]:
    """The branches, as bit sets, that share scores: a pair of a group is scored once. One group if each pair may count only once.

    A group's rows are cut at every segment's end, so a branch with few rows in the group's shortest segment starts another group.
    """
    branches = problem.pattern.branches
    if problem.pattern.overlap == "once":
        return [2 ** len(branches) - 1]
    groups: list[int] = []
    shortest = 0
    for b in sorted(range(len(branches)), key=lambda b: branches[b].segment_length):
        length, rate = min(branches[b].segment_length, problem.seq), branches[b].dilation_rate
        if groups and (shortest == length or math.ceil(shortest / rate) >= MIN_SHARED_ROWS):
            groups[-1] |= 1 << b
        else:
            groups.append(1 << b)
            shortest = length
    return groups
