"""Every kind of branch against torch's `flex_attention`, given what its docstring says of a pair as a `mask_mod`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers.calls import gradients, tensors
from helpers.pairwise import diagonal
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

from dilkit import BlockSparse, GlobalTokens, Neighborhood, Pattern, SlidingWindow, Strided, dilated_attention

SEQ, HEADS, KV_HEADS, ROW = 28, 4, 2, 7
"""Tokens, also as a grid of rows of `ROW` tokens; query heads; key/value heads."""
DRAWN = BlockSparse.bigbird(10, 3, random_blocks=2, heads=HEADS)
LAYOUT = torch.from_numpy(DRAWN.layout.array().copy())

Sees = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Whether query i of head h sees key j, of tensors h, i and j."""


class Case(NamedTuple):
    """A pattern, and the same in torch's operators on indices."""

    pattern: Pattern
    sees: Sees


def among(tokens: tuple[int, ...], positions: Tensor) -> Tensor:
    return sum((positions == token for token in tokens), positions < 0)


def near(i: Tensor, j: Tensor, size: int, kernel_size: int, dilation: int) -> Tensor:
    """Of one dimension: j has the residue of i, and is one of `kernel_size` around it, which begin no lower than the residue's
    first coordinate and end no higher than its last."""
    last = size - 1 - (size - 1 - i % dilation) % dilation
    low = torch.minimum((i - kernel_size // 2 * dilation).clamp(min=0), last - (kernel_size - 1) * dilation)
    return ((i - j) % dilation == 0) & (j >= low) & (j < low + kernel_size * dilation)


CASES = {
    "window": Case(Pattern.of(SlidingWindow(5)), lambda h, i, j: (i - j).abs() < 5),
    "dilated window": Case(Pattern.of(SlidingWindow(10, 3)), lambda h, i, j: ((i - j).abs() < 10) & ((i - j) % 3 == 0)),
    "first tokens": Case(Pattern.of(GlobalTokens(3)), lambda h, i, j: (i < 3) | (j < 3)),
    "global tokens": Case(Pattern.of(GlobalTokens([4, 20])), lambda h, i, j: among((4, 20), i) | among((4, 20), j)),
    "read tokens": Case(Pattern.of(GlobalTokens([0, 9, 27], "read")), lambda h, i, j: among((0, 9, 27), j)),
    "stride": Case(Pattern.of(Strided(5)), lambda h, i, j: (i - j) % 5 == 0),
    "blocks of each head": Case(Pattern.of(DRAWN), lambda h, i, j: LAYOUT[h, i // 3, j // 3]),
    "neighborhood, 1-D": Case(Pattern.of(Neighborhood(SEQ, 5, 4)), lambda h, i, j: near(i, j, SEQ, 5, 4)),
    "neighborhood, 2-D": Case(
        Pattern.of(Neighborhood((SEQ // ROW, ROW), (3, 3), (1, 2))),
        lambda h, i, j: near(i // ROW, j // ROW, SEQ // ROW, 3, 1) & near(i % ROW, j % ROW, ROW, 3, 2),
    ),
    "heads of their own": Case(
        Pattern.of(SlidingWindow(4, heads=(0, 3)), Strided(6, heads=(3, 4))),
        lambda h, i, j: torch.where(h < 3, (i - j).abs() < 4, (i - j) % 6 == 0),
    ),
}


def mask_mod(case: Case, is_causal: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda b, h, i, j: case.sees(h, i, j) & (i >= j) if is_causal else case.sees(h, i, j)


def by_flex(case: Case, is_causal: bool, *inputs: Tensor) -> Tensor:
    torch.compiler.reset()  # which counts how often it has seen another mask, and gives up
    blocks = flex.create_block_mask(mask_mod(case, is_causal), None, HEADS, SEQ, SEQ, device="cpu")
    query, key, value = (x.transpose(1, 2) for x in inputs)
    return flex.flex_attention(query, key, value, block_mask=blocks, enable_gqa=True).transpose(1, 2)


def by_mask(case: Case, is_causal: bool, *inputs: Tensor) -> Tensor:
    mask = flex.create_mask(mask_mod(case, is_causal), None, HEADS, SEQ, SEQ, device="cpu")
    unseen = ~mask.any(-1, keepdim=True)  # a softmax over nothing is NaN; these rows are 0
    query, key, value = (x.transpose(1, 2) for x in inputs)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask | unseen, enable_gqa=True)
    return out.masked_fill(unseen, 0.0).transpose(1, 2)


def ours(case: Case, is_causal: bool, *inputs: Tensor) -> Tensor:
    return dilated_attention(*inputs, case.pattern, is_causal=is_causal)


unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@unfused
@pytest.mark.parametrize(("name", "is_causal"), diagonal(CASES, [False, True]))
def test_results_are_those_of_flex_attention(name: str, is_causal: bool) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    inputs = tensors(seq=SEQ, heads=HEADS, kv_heads=KV_HEADS)
    expected = by_flex(case, is_causal, *inputs)
    for backend in (None, "reference"):
        found = dilated_attention(*inputs, case.pattern, is_causal=is_causal, backend=backend)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "is_causal"), diagonal(CASES, [False, True]))
def test_gradients_are_those_of_its_mask(name: str, is_causal: bool) -> None:
    """Through torch's attention with the mask that `create_mask` makes: `flex_attention` itself may have no backward pass."""
    case = CASES[name]
    torch.manual_seed(4)
    inputs = tensors(seq=SEQ, heads=HEADS, kv_heads=KV_HEADS, dtype=torch.float64)
    found, expected = (gradients(lambda *x, way=way: way(case, is_causal, *x), inputs) for way in (ours, by_mask))
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-9, atol=1e-9)


@unfused
def test_gradients_are_those_of_flex_attention() -> None:
    torch.manual_seed(5)
    inputs = tensors(seq=SEQ, heads=HEADS, kv_heads=KV_HEADS)
    for case in CASES.values():
        try:
            expected = gradients(lambda *x, case=case: by_flex(case, True, *x), inputs)
        except NotImplementedError as error:
            pytest.skip(f"torch {torch.__version__}: {error}")
        for one, right in zip(gradients(lambda *x, case=case: ours(case, True, *x), inputs), expected, strict=True):
            torch.testing.assert_close(one, right, rtol=2e-4, atol=2e-5)
