"""The layer of DilateFormer beside the same with windows copied out of padded maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from dilkit.integrations.dilateformer import MultiDilatelocalAttention


def unfolded(layer: MultiDilatelocalAttention, x: Tensor) -> Tensor:
    """By `nn.Unfold`, which takes zeros from beyond the edges, group by group of the heads' channels."""
    (batch, height, width, dim), groups, size = x.shape, len(layer.dilation), layer.kernel_size
    by_group = layer.qkv(x.permute(0, 3, 1, 2)).view(batch, 3, groups, dim // groups, height, width).unbind(2)
    parts = []
    for dilation, qkv in zip(layer.dilation, by_group, strict=True):
        q, k, v = qkv.unbind(1)
        windows = nn.Unfold(size, dilation, dilation * (size // 2))
        k, v = (windows(y).unflatten(1, (-1, layer.head_dim, size**2)) for y in (k, v))
        q = q.flatten(2).unflatten(1, (-1, layer.head_dim))
        weights = (torch.einsum("bhdn,bhdkn->bhkn", q, k) * layer.scale).softmax(2)
        parts.append(torch.einsum("bhkn,bhdkn->bnhd", weights, v).flatten(2))
    return layer.proj(torch.cat(parts, -1)).view(x.shape)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (dict(num_heads=6), (5, 4)),
        (dict(num_heads=2, qkv_bias=True, qk_scale=0.3, kernel_size=5, dilation=[2]), (3, 6)),
    ],
)
def test_windows_see_zeros_beyond_the_map(options: Any, shape: tuple[int, int]) -> None:
    layer = MultiDilatelocalAttention(12, **options).double()
    x = torch.randn(2, *shape, 12, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    found, expected, dout = layer(x), unfolded(layer, x), torch.randn_like(x)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both = [torch.autograd.grad(out, wanted, dout) for out in (found, expected)]
    assert_close(*both, rtol=1e-11, atol=1e-11)


def test_weights_are_dropped_in_training_alone() -> None:
    layer, x = MultiDilatelocalAttention(12, 3, attn_drop=0.5), torch.randn(1, 4, 4, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert_close(layer(x), unfolded(layer, x))


@pytest.mark.slow
def test_compiled_it_is_the_same_for_every_size() -> None:
    layer = MultiDilatelocalAttention(12, 3)
    compiled = torch.compile(layer, backend="eager")
    for height in (5, 2, 7, 8):
        x = torch.randn(1, height, 6, 12)
        assert_close(compiled(x), layer(x))


REFUSED: dict[str, tuple[Any, str]] = {
    "heads": (lambda: MultiDilatelocalAttention(12, 5), "dim=12 is not divisible by num_heads=5"),
    "groups": (lambda: MultiDilatelocalAttention(12, 4), r"heads=4 are no equal groups, one for each of dilations=\(1, 2, 3\)"),
    "an even window": (lambda: MultiDilatelocalAttention(12, 3, kernel_size=4), r"kernel_size=\(4, 4\): 4 is even"),
    "channels first": (lambda: MultiDilatelocalAttention(12, 3)(torch.randn(1, 12, 4, 4)), r"\(1, 12, 4, 4\); \(batch, height"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call()
