"""The layers of NAT and DiNAT, beside loops over single cells: borders, small maps, names of state dicts. And DilateFormer's."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers.definition import nearest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from dilkit.integrations.dilateformer import MultiDilatelocalAttention
from dilkit.integrations.natten import NeighborhoodAttention1D, NeighborhoodAttention2D, NeighborhoodAttention3D


def by_cells(layer: NeighborhoodAttention2D, x: Tensor) -> Tensor:
    """The layer on maps that hold a window: a list of cells, and one of entries of `rpb`, for each cell."""
    _, height, width, _ = x.shape
    (a, b), (down, right) = layer.kernel_size, layer.dilation
    seen, entries = [], []
    for y, z in product(range(height), range(width)):
        cells = [(i, j) for i in nearest(y, height, a, down) for j in nearest(z, width, b, right)]
        seen.append([i * width + j for i, j in cells])
        entries.append([((i - y) // down + a - 1) * (2 * b - 1) + (j - z) // right + b - 1 for i, j in cells])
    q, k, v = layer.qkv(x).flatten(1, 2).unflatten(-1, (3, layer.num_heads, layer.head_dim)).unbind(2)
    scores = torch.einsum("bchd,bcnhd->bhcn", q, k[:, torch.tensor(seen)]) * layer.scale
    if layer.rpb is not None:
        scores = scores + layer.rpb.flatten(1)[:, torch.tensor(entries)]
    return layer.proj(torch.einsum("bhcn,bcnhd->bchd", scores.softmax(-1), v[:, torch.tensor(seen)]).reshape(x.shape))  # type: ignore[no-any-return]


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


NAT, DILATE = partial(NeighborhoodAttention2D, 6, 2), partial(MultiDilatelocalAttention, 12)
LAYERS: dict[str, tuple[Any, tuple[int, int]]] = {
    "NAT": (partial(NAT, kernel_size=3), (4, 5)),
    "DiNAT": (partial(NAT, kernel_size=3, dilation=2), (7, 6)),
    "sides apart": (partial(NAT, kernel_size=(5, 3), dilation=(1, 2), qk_scale=0.3), (5, 7)),
    "a window as large as the map": (partial(NAT, kernel_size=3), (3, 3)),
    "without biases": (partial(NAT, kernel_size=3, rel_pos_bias=False, qkv_bias=False), (4, 4)),
    "DilateFormer": (partial(DILATE, num_heads=6), (5, 4)),
    "one rate": (partial(DILATE, num_heads=2, qkv_bias=True, qk_scale=0.3, kernel_size=5, dilation=[2]), (3, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_cell_sees_its_neighbours_with_the_bias_of_their_offset_or_zeros_beyond_the_map(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make().double()
    x = torch.randn(2, *shape, layer.qkv.weight.shape[1], dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    plain = by_cells if isinstance(layer, NeighborhoodAttention2D) else unfolded
    found, expected, dout = layer(x), plain(layer, x), torch.randn_like(x)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both = [torch.autograd.grad(out, wanted, dout) for out in (found, expected)]
    assert_close(*both, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(2, 9), (4, 3)])
def test_maps_smaller_than_a_window_are_padded_after_their_last_cells(shape: tuple[int, int]) -> None:
    layer = NeighborhoodAttention2D(6, 2, 3, 2).double()
    nn.init.normal_(layer.qkv.bias)  # so that keys of padded cells are not 0
    x = torch.randn(1, *shape, 6, dtype=torch.float64)
    height, width = shape
    padded = F.pad(x, (0, 0, 0, max(0, 6 - width), 0, max(0, 6 - height)))
    assert_close(layer(x), by_cells(layer, padded)[:, :height, :width], rtol=1e-12, atol=1e-12)


def test_a_line_and_a_volume_are_maps_with_a_side_of_one_cell() -> None:
    line, flat = NeighborhoodAttention1D(6, 2, 3, 2), NeighborhoodAttention2D(6, 2, (1, 3), (1, 2))
    solid = NeighborhoodAttention3D(6, 2, (1, 1, 3), (1, 1, 2))
    assert line.rpb is not None
    for layer, rpb in ((flat, line.rpb[:, None]), (solid, line.rpb[:, None, None])):
        layer.load_state_dict({**line.state_dict(), "rpb": rpb})
    x = torch.randn(2, 9, 6)
    assert_close(flat(x[:, None])[:, 0], line(x))
    assert_close(solid(x[:, None, None])[:, 0, 0], line(x))


@pytest.mark.parametrize("make", [partial(NeighborhoodAttention2D, 6, 2, 3), partial(MultiDilatelocalAttention, 6, 3)])
def test_weights_are_dropped_in_training_alone(make: Any) -> None:
    layer, x = make(attn_drop=0.5), torch.randn(1, 6, 6, 6)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("make", [partial(NeighborhoodAttention2D, 6, 2, 3), partial(MultiDilatelocalAttention, 6, 3)])
def test_compiled_it_is_the_same_for_every_size(make: Any) -> None:
    layer = make()
    compiled = torch.compile(layer, backend="eager")
    for height in (5, 2, 7, 8):
        x = torch.randn(1, height, 6, 6)
        assert_close(compiled(x), layer(x))


def test_the_names_are_those_of_transformers_own_layer() -> None:
    dinat = pytest.importorskip("transformers.models.dinat.modeling_dinat", reason="transformers is not installed")
    theirs = dinat.NeighborhoodAttentionModule(dinat.DinatConfig(), 6, 2, kernel_size=3, dilation=2)
    layer = NeighborhoodAttention2D(6, 2, 3, 2)
    model = nn.ModuleDict({"attention": layer})
    model.load_state_dict({f"attention.{name}": value for name, value in theirs.state_dict().items()})
    assert layer.rpb is not None
    assert torch.equal(layer.rpb, theirs.self.rpb)
    assert torch.equal(layer.qkv.weight, torch.cat([getattr(theirs.self, name).weight for name in ("query", "key", "value")]))
    assert torch.equal(layer.proj.bias, theirs.output.dense.bias)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"attention.self.query.weight": torch.zeros(6, 6)})


REFUSED: dict[str, tuple[Any, str]] = {
    "heads": (lambda: NeighborhoodAttention2D(6, 4, 3), "dim=6 is not divisible by num_heads=4"),
    "an even window": (lambda: NeighborhoodAttention2D(6, 2, 4), r"kernel_size=\(4, 4\): 4 is even"),
    "three sides": (lambda: NeighborhoodAttention2D(6, 2, (3, 3, 3)), r"kernel_size=\(3, 3, 3\) has 3 dimensions; 2 are"),
    "a list of tokens": (lambda: NeighborhoodAttention2D(6, 2, 3)(torch.randn(1, 9, 6)), r"x has shape \(1, 9, 6\); \(batch, 2"),
    "another width": (lambda: NeighborhoodAttention2D(6, 2, 3)(torch.randn(1, 3, 3, 8)), r"dim=6\) is needed"),
    "other heads": (lambda: DILATE(5), "dim=12 is not divisible by num_heads=5"),
    "groups": (lambda: DILATE(4), r"heads=4 are no equal groups, one for each of dilations=\(1, 2, 3\)"),
    "an even window of DilateFormer": (
        lambda: MultiDilatelocalAttention(12, 3, kernel_size=4),
        r"kernel_size=\(4, 4\): 4 is even",
    ),
    "channels first": (lambda: DILATE(3)(torch.randn(1, 12, 4, 4)), r"\(1, 12, 4, 4\); \(batch, height"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call()
