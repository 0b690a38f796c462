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
from torch import Tensor

from dilkit.backends.flex.blocks import BLOCK, blocks_of, ended, listed
from dilkit.backends.flex.pairs import counter, shown_by_several
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors
from dilkit.tools.measure.implementation import Implementation


def flex_attention(inputs: Tensors, problem: Problem) -> Tensor:
    """The pattern's attention, compiled at the first call of a problem, which takes many seconds."""
    return _compiled(problem, inputs.query.device)(*(x.transpose(1, 2) for x in inputs.qkv)).transpose(1, 2)


@lru_cache(maxsize=8)
def _compiled(problem: Problem, device: torch.device) -> Callable[..., Tensor]:
    """The compiled function of query, key and value `(batch, heads, seq, head_dim)`.

    It is given the count as a mask, and as a change of scores where a key may be seen more than once.
    """
    from torch.nn.attention import flex_attention as flex

    count = counter(problem.forms, problem.seq, device)

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = count(h, i, j) > 0
        return seen & (i >= j) if problem.is_causal else seen

    def weigh(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + torch.log(count(h, i, j).to(torch.float32))

    blocks = _block_mask(problem, sees, device)
    options: dict[str, Any] = dict(scale=problem.scale, enable_gqa=problem.kv_heads != problem.heads, block_mask=blocks)
    options |= dict(score_mod=weigh) if shown_by_several(problem) else {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex.flex_attention(q, k, v, **options)
        return out

    # torch counts compilations by code object and gives up after a few: each problem gets a code object of its own.
    own = FunctionType(attend.__code__.replace(), globals(), attend.__name__, None, attend.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _block_mask(problem: Problem, sees: Callable[..., Any], device: torch.device) -> Any:
    """The blocks in which a query may see a key: no matrix of `seq**2` is made."""
    from torch.nn.attention.flex_attention import BlockMask

    blocks = blocks_of(problem.forms, -(-problem.seq // BLOCK) * BLOCK, problem.heads, problem.is_causal)
    some, whole = (x[None].to(device) for x in ended(*blocks, problem.seq))
    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(problem.seq, problem.seq)
    )


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
