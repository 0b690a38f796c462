"""`flex` on the CPU, by the operators beneath FlexAttention and the block lists that generated kernels go by."""

import math
from copy import copy
from dataclasses import replace

import torch
from torch._higher_order_ops.flex_attention import create_fw_bw_graph
from torch.nn.attention import flex_attention

from dilkit import Problem
from dilkit.backend import Refusal
from dilkit.backends.flex import call, class_order
from dilkit.backends.flex.backend import LEAST_HEAD_DIM, Flex
from dilkit.pattern.flex.blocks import BLOCK
from dilkit.pattern.flex.class_order import ClassOrder

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

    def compiled(self, function, problem: Problem, *options):
        return {call.attend: attend, class_order.differentiate: differentiate}[function]


class FlexInClasses(FlexOnCpu):
    """`FlexOnCpu` in class order wherever there is one, even if it does not pay."""

    name = "flex_in_classes"

    def order(self, problem: Problem) -> ClassOrder | None:
        return class_order.order_of(problem, least=1)


def attend(q, k, v, of_weights, weights, block_mask, scale: float, grouped: bool, kernel: str):
    """Return `out` and `lse`, which the operator has to the base 2. Tensors with gradients are arguments of the score change."""
    from torch.nn.attention.flex_attention import _identity

    mod, buffers = _identity if of_weights is None else of_weights(weights), ()
    if weights is not None:
        mod, buffers = lambda s, b, h, i, j, own: of_weights(own)(s, b, h, i, j), (weights,)
    blocks = *block_mask.as_tuple()[:-1], by_lists(block_mask)
    out, lse, _ = torch.ops.higher_order.flex_attention(q, k, v, mod, blocks, scale, dict(OPTIONS), buffers, ())
    return out, lse * math.log(2)


def differentiate(*arguments):
    """Return the gradients by the dense operator, which needs `joint` where autograd records nothing."""
    *before, of_weights, weights, block_mask, scale, kernel = arguments
    block_mask = copy(block_mask)
    block_mask.mask_mod = by_lists(block_mask)
    score, index = torch.zeros((), requires_grad=True), torch.zeros((), dtype=torch.int)
    mod = flex_attention._identity if of_weights is None else of_weights(weights)
    _, joint = create_fw_bw_graph(mod, (score, index, index, index, index), ())
    return class_order.differentiate(*before, of_weights, weights, block_mask, scale, kernel, joint)


def by_lists(block_mask):
    """Make the mask that generated kernels go by: of listed blocks alone, and pair by pair of partial ones.

    Dense operators ask the mask of the call for every pair.
    """
    keys = -(-block_mask.seq_lengths[1] // BLOCK)
    some, whole = (
        torch.zeros(*numbers.shape, keys + 1, dtype=torch.bool).scatter_(
            3, torch.where(torch.arange(indices.shape[3]) < numbers[..., None], indices.long(), keys), True
        )
        for numbers, indices in (
            (block_mask.kv_num_blocks, block_mask.kv_indices),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        )
    )
    (batches, heads), asked = some.shape[:2], block_mask.mask_mod

    def mask_mod(b, h, i, j):
        block = b % batches, h % heads, i // BLOCK, j // BLOCK
        return whole[block] | some[block] & asked(b, h, i, j)

    return mask_mod
