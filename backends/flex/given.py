"""The block layout of a call in FlexAttention: which pairs it shows, and which blocks of the block mask hold any.

blocks of the layout        | r0      | r1      | r2      |
blocks of the mask          | R0  | R1  | R2  | R3  | R4  |       R1 holds pairs of what r0 or r1 see
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dilkit.backends.flex.blocks import BLOCK
from dilkit.op.block_layout import as_bools
from dilkit.pattern.lowering import GivenBlocks
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

Shown = Callable[[Any, Any, Any, Any], Any]


def given_pairs(layout: Tensor, problem: Problem, length: int) -> Shown:
    """Whether the layout shows a pair, of `length` rows at most: `shows(b, h, i, j)`, int32."""
    (form,) = (one for one in problem.forms if isinstance(one, GivenBlocks))
    seen, missing = as_bools(layout, problem.heads), -(-length // form.block) - layout.shape[2]
    seen = torch.nn.functional.pad(seen, (0, missing, 0, missing))
    first, stop = form.heads
    batches, heads = seen.shape[:2]

    def shows(b: Any, h: Any, i: Any, j: Any) -> Any:
        served = (h >= first) & (h < stop)
        own = seen[b if batches > 1 else b * 0, h if heads > 1 else h * 0, i // form.block, j // form.block]
        return (served & own).to(torch.int32)

    return shows


def given_blocks(layout: Tensor, problem: Problem, count: int) -> Tensor:
    """Which of `count` blocks a side hold a pair, bool `(batch or 1, heads, count, count)`."""
    (form,) = (one for one in problem.forms if isinstance(one, GivenBlocks))
    seen = as_bools(layout, problem.heads)
    first = torch.arange(seen.shape[2], device=seen.device)[:, None] * form.block
    edges = torch.arange(count, device=seen.device) * BLOCK
    overlap = ((first < edges + BLOCK) & (edges < first + form.block)).float()
    some = (overlap.T @ seen.float() @ overlap > 0).expand(-1, problem.heads, -1, -1).clone()
    some[:, : form.heads[0]] = some[:, form.heads[1] :] = False
    return some.tril() if problem.is_causal else some
