"""Other packages' dilated attention, restated from what they compute, against the calls that docs/migrating.md gives for them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.project import ROOT
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

PAGE = (ROOT / "docs" / "migrating.md").read_text()


def on_the_page(language: str, word: str, **names: Any) -> dict[str, Any]:
    """The names that the block of code defines in which `word` is."""
    (code,) = [code for code in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if word in code]
    exec(code, names)
    return names


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Of `(batch, rows, heads, head_dim)`."""
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal).transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_in_groups_with_a_branch_each(is_causal: bool) -> None:
    lengths, rates, in_group = [8, 24, 96], [1, 2, 4], 2
    tensors = torch.randn(3, 2, 96, 6, 16, dtype=torch.float64).unbind()
    right = torch.zeros_like(tensors[0])
    for i, (length, rate) in enumerate(zip(lengths, rates, strict=True)):
        own = slice(None), slice(None), slice(i % rate, None, rate), slice(i * in_group, (i + 1) * in_group)
        segments = [x.unflatten(1, (-1, length))[own] for x in tensors]
        outputs = attention(*(x.flatten(0, 1) for x in segments), is_causal).view_as(segments[0])
        right.unflatten(1, (-1, length))[own] = outputs / outputs.sum(dim=(1, 2), keepdim=True)
    out = on_the_page("python", "grouped_attention")["grouped_attention"](*tensors, lengths, rates, is_causal)
    torch.testing.assert_close(out / out.sum(dim=1, keepdim=True) / 3, right / 3, rtol=1e-9, atol=1e-9)


class Layer(nn.Module):
    """One branch: the first of every `dilation_rate` tokens of a segment attend to each other, as one head."""

    segment_size, dilation_rate = 16, 2

    def __init__(self) -> None:
        super().__init__()
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(32, 32, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.segment_size))[:, :, :: self.dilation_rate]
        return scaled_dot_product_attention(self.proj_q(x), self.proj_k(x), self.proj_v(x)).flatten(1, 2)


def test_one_branch_of_one_head() -> None:
    from dilkit import Pattern, dilated_attention

    layer, x = Layer(), torch.randn(2, 64, 32, dtype=torch.float64)
    names = dict(layer=layer, x=x, Pattern=Pattern, dilated_attention=dilated_attention)
    torch.testing.assert_close(on_the_page("py", "layer.proj_q", **names)["out"], layer(x), rtol=1e-12, atol=1e-12)
