"""The layers of NAT and DiNAT: parity with loops over single cells, borders, small maps, and the names of state dicts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers.definition import nearest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

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


LAYERS: dict[str, tuple[Any, tuple[int, int]]] = {
    "NAT": (dict(kernel_size=3), (4, 5)),
    "DiNAT": (dict(kernel_size=3, dilation=2), (7, 6)),
    "sides apart": (dict(kernel_size=(5, 3), dilation=(1, 2), qk_scale=0.3), (5, 7)),
    "a window as large as the map": (dict(kernel_size=3), (3, 3)),
    "without biases": (dict(kernel_size=3, rel_pos_bias=False, qkv_bias=False), (4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_cell_sees_its_neighbours_with_the_bias_of_their_offset(name: str) -> None:
    options, shape = LAYERS[name]
    layer = NeighborhoodAttention2D(6, 2, **options).double()
    x = torch.randn(2, *shape, 6, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    found, expected, dout = layer(x), by_cells(layer, x), torch.randn_like(x)
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


def test_weights_are_dropped_in_training_alone() -> None:
    layer, x = NeighborhoodAttention2D(6, 2, 3, attn_drop=0.5), torch.randn(1, 6, 6, 6)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.slow
def test_compiled_it_is_the_same_for_every_size() -> None:
    layer = NeighborhoodAttention2D(6, 2, 3)
    compiled = torch.compile(layer, backend="eager")
    for height in (5, 2, 7, 8):
        x = torch.randn(1, height, 6, 6)
        assert_close(compiled(x), layer(x))


def of_transformers(layer: NeighborhoodAttention2D) -> dict[str, Tensor]:
    """The layer's state by the names of `attention` of a DinatLayer."""
    state, renamed = layer.state_dict(), {}
    for kind in ("weight", "bias"):
        for name, part in zip(("query", "key", "value"), state[f"qkv.{kind}"].chunk(3), strict=True):
            renamed[f"self.{name}.{kind}"] = part
        renamed[f"output.dense.{kind}"] = state[f"proj.{kind}"]
    return renamed | {"self.rpb": state["rpb"]}


def test_state_dicts_of_transformers_load_within_a_model() -> None:
    layer, other = NeighborhoodAttention2D(6, 2, 3), NeighborhoodAttention2D(6, 2, 3)
    model = nn.ModuleDict({"attention": other})
    model.load_state_dict({f"attention.{name}": value for name, value in of_transformers(layer).items()})
    x = torch.randn(1, 5, 5, 6)
    assert torch.equal(other(x), layer(x))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"attention.self.query.weight": torch.zeros(6, 6)})


@pytest.mark.slow
def test_the_names_are_those_of_transformers_own_layer() -> None:
    dinat = pytest.importorskip("transformers.models.dinat.modeling_dinat", reason="transformers is not installed")
    theirs = dinat.NeighborhoodAttentionModule(dinat.DinatConfig(), 6, 2, kernel_size=3, dilation=2)
    layer = NeighborhoodAttention2D(6, 2, 3, 2)
    layer.load_state_dict(theirs.state_dict())
    assert layer.rpb is not None
    assert torch.equal(layer.rpb, theirs.self.rpb)


REFUSED: dict[str, tuple[Any, str]] = {
    "heads": (lambda: NeighborhoodAttention2D(6, 4, 3), "dim=6 is not divisible by num_heads=4"),
    "an even window": (lambda: NeighborhoodAttention2D(6, 2, 4), r"kernel_size=\(4, 4\): 4 is even"),
    "three sides": (lambda: NeighborhoodAttention2D(6, 2, (3, 3, 3)), r"kernel_size=\(3, 3, 3\) has 3 dimensions; 2 are"),
    "a list of tokens": (lambda: NeighborhoodAttention2D(6, 2, 3)(torch.randn(1, 9, 6)), r"x has shape \(1, 9, 6\); \(batch, 2"),
    "another width": (lambda: NeighborhoodAttention2D(6, 2, 3)(torch.randn(1, 3, 3, 8)), r"dim=6\) is needed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call()
