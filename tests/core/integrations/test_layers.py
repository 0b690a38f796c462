"""Layers of other packages beside restatements of them: NAT's, DilateFormer's, TITAN's, and LongNets of docs/migrating.md."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.definition import nearest
from helpers.live_bytes import LiveBytes
from helpers.project import ROOT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from dilkit import Pattern, alibi_slopes, dilated_attention
from dilkit.integrations.dilateformer import MultiDilatelocalAttention
from dilkit.integrations.natten import NeighborhoodAttention1D, NeighborhoodAttention2D, NeighborhoodAttention3D
from dilkit.integrations.titan import TitanAttention, replace_attention

NAT, DILATE = partial(NeighborhoodAttention2D, 6, 2), partial(MultiDilatelocalAttention, 12)


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
    return layer.proj(torch.einsum("bhcn,bcnhd->bchd", scores.softmax(-1), v[:, torch.tensor(seen)]).reshape(x.shape))


def unfolded(layer: MultiDilatelocalAttention, x: Tensor) -> Tensor:
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
    return layer.proj(torch.cat(parts, -1)).view(x.shape)


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
def test_each_cell_sees_its_neighbours_with_their_biases(name: str) -> None:
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
    layer = NAT(3, 2).double()
    nn.init.normal_(layer.qkv.bias)  # so that keys of padded cells are not 0
    x = torch.randn(1, *shape, 6, dtype=torch.float64)
    height, width = shape
    padded = F.pad(x, (0, 0, 0, max(0, 6 - width), 0, max(0, 6 - height)))
    assert_close(layer(x), by_cells(layer, padded)[:, :height, :width], rtol=1e-12, atol=1e-12)


def test_a_line_and_a_volume_are_maps_with_a_side_of_one_cell() -> None:
    line, flat = NeighborhoodAttention1D(6, 2, 3, 2), NAT((1, 3), (1, 2))
    solid = NeighborhoodAttention3D(6, 2, (1, 1, 3), (1, 1, 2))
    assert line.rpb is not None
    for layer, rpb in ((flat, line.rpb[:, None]), (solid, line.rpb[:, None, None])):
        layer.load_state_dict({**line.state_dict(), "rpb": rpb})
    x = torch.randn(2, 9, 6)
    assert_close(flat(x[:, None])[:, 0], line(x))
    assert_close(solid(x[:, None, None])[:, 0, 0], line(x))


@pytest.mark.parametrize("make", [partial(NAT, 3), partial(MultiDilatelocalAttention, 6, 3)])
def test_weights_are_dropped_in_training_alone(make: Any) -> None:
    layer, x = make(attn_drop=0.5), torch.randn(1, 6, 6, 6)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_the_names_are_those_of_transformers_own_layer() -> None:
    dinat = pytest.importorskip("transformers.models.dinat.modeling_dinat", reason="transformers is not installed")
    theirs = dinat.NeighborhoodAttentionModule(dinat.DinatConfig(), 6, 2, kernel_size=3, dilation=2)
    layer = NAT(3, 2)
    model = nn.ModuleDict({"attention": layer})
    model.load_state_dict({f"attention.{name}": value for name, value in theirs.state_dict().items()})
    assert layer.rpb is not None
    assert torch.equal(layer.rpb, theirs.self.rpb)
    assert torch.equal(layer.qkv.weight, torch.cat([getattr(theirs.self, name).weight for name in ("query", "key", "value")]))
    assert torch.equal(layer.proj.bias, theirs.output.dense.bias)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"attention.self.query.weight": torch.zeros(6, 6)})


class PlainAttention(nn.Module):
    """A block's attention as TITAN defines it, with a matrix `(batch, heads, 1 + tiles, 1 + tiles)`."""

    def __init__(self, pos_encode: str = "alibi", attn_drop: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.pos_encode, self.attn_drop_prob = 3, 4, pos_encode, attn_drop
        self.qkv, self.proj, self.proj_drop = nn.Linear(12, 36), nn.Linear(12, 12), nn.Dropout(0.0)
        self.q_norm, self.k_norm = (nn.LayerNorm(4) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, attn_bias: Tensor, bg_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", self.q_norm(q), self.k_norm(k)) / 2 + attn_bias
        if bg_mask is not None and len(x) > 1:
            seen = torch.cat([torch.ones(len(x), 1, dtype=torch.bool), bg_mask.flatten(1)], 1)
            both = (seen[:, :, None] & seen[:, None]) | torch.eye(x.shape[1], dtype=torch.bool)
            scores = scores.masked_fill(~both[:, None], -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
        return self.proj_drop(self.proj(out))


def matrix(coordinates: Tensor) -> Tensor:
    batch, tiles, _ = coordinates.shape
    bias = torch.zeros(batch, 3, 1 + tiles, 1 + tiles, dtype=coordinates.dtype)
    bias[:, :, 1:, 1:] = -alibi_slopes(3).to(bias)[:, None, None] * torch.cdist(coordinates, coordinates)[:, None]
    return bias


class PlainEncoder(nn.Module):
    """Slide encoder with the module names that `replace_attention` looks for, which passes the bias to its blocks."""

    def __init__(self, pos_encode: str = "alibi") -> None:
        super().__init__()
        self.pos_encode_type, self.blocks = pos_encode, nn.Module()
        self.blocks.modules_list = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(12)}) for _ in range(2))
        for block in self.blocks.modules_list:
            block.attn = PlainAttention(pos_encode)
        self.local_alibi, self.local_alibi_status = self.get_alibi(6, 6), True

    def get_alibi(self, w: int, h: int, bg_mask: Tensor | None = None) -> Tensor:
        cells = torch.tensor([(x, y) for x in range(w) for y in range(h)], dtype=torch.float32)
        return matrix((cells if bg_mask is None else cells[bg_mask.flatten()])[None])

    def forward_features(self, grid: Tensor, bg_mask: Tensor) -> Tensor:
        batch, w, h, dim = grid.shape
        bias = self.get_alibi(w, h, bg_mask) if batch == 1 else self.get_alibi(w, h)
        bias = bias.repeat(batch, 1, 1, 1).type(grid.dtype)
        tokens = grid[bg_mask][None] if batch == 1 else grid.flatten(1, 2)
        x = torch.cat([torch.ones(batch, 1, dim), tokens], 1)
        for block in self.blocks.modules_list:
            x = x + block.attn(block["norm"](x), attn_bias=bias, bg_mask=bg_mask)
        return x


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_attention_with_the_matrix_of_all_pairs(masked: bool) -> None:
    plain = PlainAttention(norm=masked).double()
    attention = TitanAttention.of(plain)
    x = torch.randn(2, 1 + 12, 12, dtype=torch.float64, requires_grad=True)
    coordinates = torch.randint(0, 9, (2, 12, 2)).double()
    mask = torch.rand(2, 3, 4) < 0.6 if masked else None
    wanted, dout = [x, *plain.parameters()], torch.randn_like(x)
    found, expected = attention(x, coordinates, mask), plain(x, matrix(coordinates), mask)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    both = [torch.autograd.grad(out, wanted, dout) for out in (found, expected)]
    assert_close(*both, rtol=1e-11, atol=1e-11)


def test_a_slide_without_tiles_is_its_class_token() -> None:
    plain, x = PlainAttention().double(), torch.randn(2, 5, 12, dtype=torch.float64)
    attention, coordinates, nothing = TitanAttention.of(plain), torch.rand(1, 4, 2), torch.zeros(2, 4, dtype=torch.bool)
    assert_close(attention(x, coordinates, nothing), plain(x, matrix(coordinates), nothing))
    assert_close(attention(x[:, :1], coordinates[:, :0]), plain(x[:, :1], torch.zeros(1)))


def test_less_memory_than_that_of_a_matrix_of_all_pairs() -> None:
    x, coordinates = torch.randn(1, 501, 12, requires_grad=True), torch.rand(1, 500, 2)
    with LiveBytes(x) as live:
        TitanAttention.of(PlainAttention())(x, coordinates).sum().backward()
    assert live.peak < 3 * 500**2 * 4


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_is_changed_to_it_with_its_state_dict(batch: int) -> None:
    model = nn.Module()
    model.vision_encoder = encoder = PlainEncoder()
    grid, mask, names = torch.randn(batch, 3, 4, 12), torch.rand(batch, 3, 4) < 0.7, list(model.state_dict())
    before = encoder.forward_features(grid, mask)
    for _ in range(2):  # a second time it stays as it is
        replace_attention(model)
        assert_close(encoder.forward_features(grid, mask), before, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    assert (encoder.local_alibi.shape, encoder.local_alibi_status) == ((1, 1, 36, 2), False)


MAPS, SLIDES = (
    [(torch.randn(1, n, 6, 6),) for n in (5, 2, 7, 8)],
    [(torch.randn(2, 1 + n, 12), torch.rand(2, n, 2)) for n in (5, 9)],
)
COMPILED = [(NAT(3), MAPS), (MultiDilatelocalAttention(6, 3), MAPS), (TitanAttention(12, 3), SLIDES)]


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "inputs"), COMPILED, ids=lambda x: type(x).__name__)
def test_compiled_it_is_the_same_for_every_size(layer: nn.Module, inputs: Any) -> None:
    compiled = torch.compile(layer, fullgraph=isinstance(layer, TitanAttention), backend="eager")
    for tensors in inputs:
        assert_close(compiled(*tensors), layer(*tensors))


def tiles_of(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return lambda: TitanAttention(12, 3)(torch.randn(2, 5, 12), torch.zeros(shape, dtype=dtype), **options)


def hooked() -> nn.Module:
    module = PlainAttention()
    module.register_forward_hook(lambda *call: None)
    return module


REFUSED: dict[str, tuple[Any, str]] = {
    "heads": (lambda: NeighborhoodAttention2D(6, 4, 3), "dim=6 is not divisible by num_heads=4"),
    "an even window": (lambda: NAT(4), r"kernel_size=\(4, 4\): 4 is even"),
    "three sides": (lambda: NAT((3, 3, 3)), r"kernel_size=\(3, 3, 3\) has 3 dimensions; 2 are"),
    "a list of tokens": (lambda: NAT(3)(torch.randn(1, 9, 6)), r"x has shape \(1, 9, 6\); \(batch, 2"),
    "another width": (lambda: NAT(3)(torch.randn(1, 3, 3, 8)), r"dim=6\) is needed"),
    "other heads": (lambda: DILATE(5), "dim=12 is not divisible by num_heads=5"),
    "groups": (lambda: DILATE(4), r"heads=4 are no equal groups, one for each of dilations=\(1, 2, 3\)"),
    "an even window of DilateFormer": (lambda: DILATE(3, kernel_size=4), r"kernel_size=\(4, 4\): 4 is even"),
    "channels first": (lambda: DILATE(3)(torch.randn(1, 12, 4, 4)), r"\(1, 12, 4, 4\); \(batch, height"),
    "a matrix": (tiles_of(2, 3, 5, 5), r"attn_bias has shape \(2, 3, 5, 5\); the coordinates of the tiles, \(2 or 1"),
    "of other tiles": (tiles_of(2, 5, 2), r"\(2 or 1, 4, 2\), are needed"),
    "rounded": (tiles_of(2, 4, 2, dtype=torch.bfloat16), "attn_bias is torch.bfloat16, which rounds coordinates"),
    "dropout": (lambda: TitanAttention.of(PlainAttention(attn_drop=0.1)), "attn_drop_prob=0.1"),
    "a hook": (lambda: TitanAttention.of(hooked()), "with hooks .*which would be lost; register hooks"),
    "another encoding": (lambda: replace_attention(PlainEncoder("abs")), "pos_encode='abs'"),
    "heads of TITAN": (lambda: TitanAttention(12, 5), "dim=12 is not divisible by num_heads=5"),
    "another mask": (tiles_of(2, 4, 2, bg_mask=torch.ones(2, 5).bool()), r"bg_mask is .*\(2, 5\); bool \(2, 4\) is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(TypeError if name == "rounded" else ValueError, match=text):
        call()


def test_one_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        made = TitanAttention(12, 3)
    assert torch.equal(made.to_empty(device="cpu").slopes, alibi_slopes(3))


PAGE = (ROOT / "docs" / "migrating.md").read_text()


def on_the_page(language: str, word: str, **names: Any) -> dict[str, Any]:
    (code,) = [code for code in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if word in code]
    exec(code, names)
    return names


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal).transpose(1, 2)


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


def test_one_branch_of_one_head() -> None:
    """The first of every 2 tokens of a segment of 16 attend to each other, as one head."""
    projections = {f"proj_{name}": nn.Linear(32, 32, dtype=torch.float64) for name in "qkv"}
    layer = SimpleNamespace(segment_size=16, dilation_rate=2, **projections)
    x = torch.randn(2, 64, 32, dtype=torch.float64)
    rows = x.unflatten(1, (-1, 16))[:, :, ::2]
    right = F.scaled_dot_product_attention(layer.proj_q(rows), layer.proj_k(rows), layer.proj_v(rows)).flatten(1, 2)
    names = dict(layer=layer, x=x, Pattern=Pattern, dilated_attention=dilated_attention)
    assert_close(on_the_page("py", "layer.proj_q", **names)["out"], right, rtol=1e-12, atol=1e-12)
