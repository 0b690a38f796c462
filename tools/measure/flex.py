"""torch's FlexAttention, compiled, on the count of the pattern: a mask where the count is 0, and the log of the count added."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, unflatten

from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.measure.pairs import counter

BLOCK = 128
"""Rows and columns of a block of FlexAttention's mask."""


def flex_attention(inputs: Tensors, problem: Problem) -> Tensor:
    """The pattern's attention, compiled at the first call of a problem, which takes many seconds."""
    return _compiled(problem, inputs.query.device)(*(x.transpose(1, 2) for x in inputs.qkv)).transpose(1, 2)


@lru_cache(maxsize=8)
def _compiled(problem: Problem, device: torch.device) -> Callable[..., Tensor]:
    """The compiled function of query, key and value `(batch, heads, seq, head_dim)`.

    It is given the count as a mask, and as a change of scores where a key may be seen more than once.
    """
    from torch.nn.attention import flex_attention as flex

    count = counter(problem, device)

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = count(h, i, j) > 0
        return seen & (i >= j) if problem.is_causal else seen

    def weigh(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + torch.log(count(h, i, j).to(torch.float32))

    blocks = _block_mask(problem, sees, device)
    options: dict[str, Any] = dict(scale=problem.scale, enable_gqa=problem.kv_heads != problem.heads, block_mask=blocks)
    options |= dict(score_mod=weigh) if _counts_above_one(problem) else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex.flex_attention(q, k, v, **options)
        return out

    # torch counts compilations by code object and gives up after a few: each problem gets a code object of its own.
    own = FunctionType(attend.__code__.replace(), globals(), attend.__name__, None, attend.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _counts_above_one(problem: Problem) -> bool:
    """Whether a key may be seen more than once: several branches serve the same head."""
    served = [sum(branch.serves(head) for branch in problem.pattern.branches) for head in range(problem.heads)]
    return problem.pattern.overlap == "count" and max(served) > 1


def _block_mask(problem: Problem, sees: Callable[..., Any], device: torch.device) -> Any:
    """The blocks in which any query sees any key: no matrix of `seq**2` is made."""
    from torch.nn.attention.flex_attention import BlockMask

    blocks = _blocks if problem.pattern.only_segments else _blocks_of_any_kind
    some, whole = (x.to(device) for x in blocks(problem))
    partial = some & ~whole
    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(problem.seq, problem.seq)
    )


def _blocks(problem: Problem) -> tuple[Tensor, Tensor]:
    """Which blocks hold a pair that is seen, and which hold nothing else: bool `(1, heads, blocks, blocks)`.

    A block that a branch sees whole is one of a branch of rate 1, or it counts among the others.
    """
    seq, group = problem.seq, problem.heads // problem.kv_heads
    rows, count = torch.arange(seq), -(-seq // BLOCK)
    some, whole = (torch.zeros(problem.heads, count, count, dtype=torch.bool) for _ in range(2))
    for branch in problem.pattern.segments:
        length, rate = min(branch.segment_length, seq), branch.dilation_rate
        for head in filter(branch.serves, range(problem.heads)):
            kept = rows % length % rate == problem.pattern.head_offset(rate, head // group, problem.kv_heads)
            held = torch.zeros(count, -(-seq // length), dtype=torch.float32)
            held.index_put_((rows[kept] // BLOCK, rows[kept] // length), torch.ones(()), accumulate=True)
            some[head] |= (held > 0).float() @ (held > 0).float().T > 0
            filled = (held == BLOCK).float()
            whole[head] |= filled @ filled.T > 0
    if problem.is_causal:
        some, whole = some.tril(), whole.tril(-1)
    return some[None], whole[None]


def _blocks_of_any_kind(problem: Problem) -> tuple[Tensor, Tensor]:
    """As `_blocks`, from the count of as many rows at a time as a block has."""
    seq, missing, found = problem.seq, -problem.seq % BLOCK, []
    for rows in torch.split(torch.arange(seq), BLOCK):
        seen = problem.pattern.count_rows(rows, seq, problem.heads, kv_heads=problem.kv_heads, is_causal=problem.is_causal) > 0
        cells = unflatten(torch.nn.functional.pad(seen, (0, missing, 0, BLOCK - len(rows))), 2, (-1, BLOCK))
        found.append((cells.any(3).any(1), cells.all(3).all(1)))
    some, whole = (torch.stack(rows, 1)[None] for rows in zip(*found, strict=True))
    return some, whole


def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are set in each row, and their columns first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def compiler() -> str:
    """The C++ compiler that torch would call."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def _refusals(problem: Problem) -> tuple[str, ...]:
    on_cpu = problem.device.type == "cpu"
    asked = {
        "key_padding_mask: not supported": problem.key_padding_mask,
        "dtype float64: FlexAttention is not compiled for it": problem.dtype == "float64",
        "backward: FlexAttention has none on the CPU": on_cpu and problem.requires_grad,
        f"C++ compiler {compiler()!r}: not found, and torch.compile needs one; install it, or name yours in CXX": on_cpu
        and not shutil.which(compiler()),
        "module triton: not installed, and torch.compile needs it on CUDA": not on_cpu and find_spec("triton") is None,
    }
    return tuple(reason for reason, wanted in asked.items() if wanted)


FLEX = Implementation(
    "flex",
    "peer",
    "torch's FlexAttention, compiled: the count as mask_mod and score_mod",
    flex_attention,
    _refusals,
)
