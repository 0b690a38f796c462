"""The backend `flex` on the CPU: by the operators beneath FlexAttention, whose dense form computes every pair.

torch refuses gradients there, and `lse` of what is compiled; of these operators both are there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from dilkit.backend import Refusal
from dilkit.backends.flex.backend import LEAST_HEAD_DIM, Attend, Flex
from dilkit.problem import Problem

OPTIONS = dict(PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False, BLOCKS_ARE_CONTIGUOUS=False, WRITE_DQ=True)
OPTIONS |= dict(BACKEND="AUTO", OUTPUT_LOGSUMEXP=True, OUTPUT_MAX=False)


class FlexOnCpu(Flex):
    """Everything of `flex` but the compiled function."""

    name = "flex_on_cpu"
    requires = ("torch",)
    limits = replace(Flex.limits, devices=frozenset({"cpu"}), min_capability=None)
    priority = -1

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        return tuple(one for one in super().refusals(problem) if str(LEAST_HEAD_DIM) not in one.limit or one.code != "head_dim")

    def attend(self, problem: Problem) -> Attend:
        return attend


def attend(q: Any, k: Any, v: Any, of_weights: Any, weights: Any, block_mask: Any, scale: float, grouped: bool) -> Any:
    """`out` and `lse`; that of the operator is to the base 2. What has a gradient is an argument of the scores' change."""
    from torch.nn.attention.flex_attention import _identity

    mod, buffers = _identity if of_weights is None else of_weights(weights), ()
    if weights is not None:
        mod, buffers = lambda s, b, h, i, j, own: of_weights(own)(s, b, h, i, j), (weights,)
    out, lse, _ = torch.ops.higher_order.flex_attention(q, k, v, mod, block_mask.as_tuple(), scale, dict(OPTIONS), buffers, ())
    return out, lse * math.log(2)
