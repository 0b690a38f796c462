"""The CPU kernel: all branches in one pass over the rows, threads of its own, C code for each instruction set.

A span of consecutive rows of one head is a piece of work. Its rows fall into lists that see the same keys: those that take
part in the same branches and segments. A list runs one online softmax over its keys, each distinct key scored once, with
`+ log` of how many branches see it. Rows and keys are packed tile by tile, so nothing grows with the number of branches.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from dilkit import environment, plan
from dilkit.backend import Backend, Limits, Refusal
from dilkit.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor

MAX_BRANCHES = 64
"""Sets of branches are the bits of a machine word."""

SPAN = 1024
"""Rows of a piece of work, at most; a multiple of 16. Scratch grows with it, packing of keys shrinks."""

SPAN_NUMBERS = 2**17
"""Rows times head_dim of a piece of work, at most: what a core's cache takes."""

BLOCK, BLOCKS = 8192, 16
"""The gradients cut a sequence into blocks of so many rows, into no more than so many; shorter ones lose speed."""

PIECES_AT_ONCE = 32
"""Blocks times key heads that are there to be computed side by side, even if that takes shorter blocks."""

PIECES = 64
"""Shorter problems are cut into about as many pieces, so that every core gets some."""

SHORT_SPAN, TINY = 128, 2048
"""But not into pieces of fewer rows, which lose a third of the speed; unless there are too few rows for that to matter."""

WORTHWHILE = 32
"""Rows that a branch should find in a segment of those it shares scores with; with fewer it runs on its own."""

FLOPS_PER_THREAD = 2**22
"""A thread more for each: starting one takes as long as computing these."""


class Native(Backend):
    """One fused kernel for every pattern; `DILKIT_CPU_ISA` says which instruction set, by default the best there is."""

    name = "native"
    summary = "our C kernel, all branches in one pass: CPU"
    requires = ("torch",)
    limits = Limits(devices=frozenset({"cpu"}))
    priority = 20
    reproducible = True

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        branches = len(problem.pattern.branches)
        if branches <= MAX_BRANCHES:
            return super().refusals(problem)
        return (*super().refusals(problem), Refusal("branches", str(branches), f"at most {MAX_BRANCHES}"))

    def detail(self, problem: Problem) -> str:
        return instruction_set()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        import torch

        from dilkit.backends.native import _native

        out = torch.empty(query.shape, dtype=query.dtype)
        lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.empty(problem.batch, problem.heads, problem.seq, dtype=lse_dtype)
        tensors = [_place(x) for x in (query, key, value, out)]
        _native.forward(
            _layout(problem), instruction_set(), _threads(problem), tensors, lse.data_ptr(), _mask_place(key_padding_mask)
        )
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

        from dilkit.backends.native import _native

        lse = lse.contiguous()
        delta = torch.empty(lse.shape, dtype=lse.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (query, key, value))
        _native.backward(
            _layout(problem),
            instruction_set(),
            _threads(problem),
            [_place(x) for x in (query, key, value, out)],
            lse.data_ptr(),
            _mask_place(key_padding_mask),
            [_place(x) for x in (dout, dq, dk, dv)],
            delta.data_ptr(),
        )
        return dq, dk, dv


def instruction_set() -> str:
    """The name of the instruction set whose code runs: what `DILKIT_CPU_ISA` says, else the best that this machine has."""
    from dilkit.backends.native import _native

    return environment.cpu_isa(_native.instruction_sets())


def _threads(problem: Problem) -> int:
    import torch

    return max(1, min(torch.get_num_threads(), 1 + problem.flops() // FLOPS_PER_THREAD))


def _place(x: Tensor) -> tuple[int, ...]:
    """Where a tensor begins, and its first three strides in bytes."""
    return x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[:3])


def _mask_place(mask: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())


def _layout(problem: Problem) -> Any:
    sizes = problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim
    options = problem.dtype, problem.is_causal, problem.scale
    return plan.cached(("native", problem.pattern.to_json(), sizes, options), partial(_make_layout, problem))


def _make_layout(problem: Problem) -> Any:
    from dilkit.backends.native import _native

    return _native.Layout(*layout_arguments(problem))


def layout_arguments(problem: Problem) -> tuple[Any, ...]:
    """What `_native.Layout` takes: sizes, dtype, flags, scale, and the branches as arrays."""
    import numpy as np

    pattern, heads, kv_heads = problem.pattern, problem.heads, problem.kv_heads
    offsets = [
        [
            pattern.head_offset(branch.dilation_rate, head * kv_heads // heads, kv_heads) if branch.serves(head) else -1
            for branch in pattern.branches
        ]
        for head in range(heads)
    ]
    return (
        (problem.batch, problem.seq, heads, kv_heads, problem.head_dim, _span(problem), *_blocks(problem)),
        DTYPES.index(problem.dtype),
        problem.is_causal,
        pattern.overlap == "once",
        problem.scale,
        np.array([min(branch.segment_length, problem.seq) for branch in pattern.branches], np.int64),
        np.array([min(branch.dilation_rate, problem.seq) for branch in pattern.branches], np.int64),
        np.array(offsets, np.int64),
        np.array(_groups(problem), np.uint64),
    )


def _span(problem: Problem) -> int:
    """Rows of a piece of work: by the problem alone, so that results do not depend on the machine."""
    total = problem.seq * problem.batch * problem.heads
    rows = min(SPAN, SPAN_NUMBERS // problem.head_dim, max(total // PIECES, SHORT_SPAN if total >= TINY else 0))
    return max(rows // 16 * 16, 16)


def _blocks(problem: Problem) -> tuple[int, int]:
    """Into how many blocks the gradients cut the sequence, and their rows; (0, 0) where they take two passes."""
    if problem.dtype not in ("float32", "float64"):
        return 0, 0
    spans = math.ceil(problem.seq / _span(problem))
    wanted = max(problem.seq // BLOCK, math.ceil(PIECES_AT_ONCE / max(problem.batch * problem.kv_heads, 1)))
    per_block = math.ceil(spans / min(wanted, BLOCKS))
    return math.ceil(spans / max(per_block, 1)), per_block * _span(problem)


def _groups(problem: Problem) -> list[int]:
    """The branches, as bit sets, that share scores: a pair of a group is scored once. All, if each pair may count only once.

    A group's rows are cut at every segment's end, so a branch with few rows in the group's shortest segment starts another group.
    """
    branches = problem.pattern.branches
    if problem.pattern.overlap == "once":
        return [2 ** len(branches) - 1]
    groups: list[int] = []
    shortest = 0
    for b in sorted(range(len(branches)), key=lambda b: branches[b].segment_length):
        length, rate = min(branches[b].segment_length, problem.seq), branches[b].dilation_rate
        if groups and (shortest == length or math.ceil(shortest / rate) >= WORTHWHILE):
            groups[-1] |= 1 << b
        else:
            groups.append(1 << b)
            shortest = length
    return groups
