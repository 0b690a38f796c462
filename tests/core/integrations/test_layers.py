"""Layers of other packages beside restatements of them."""

import copy
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.definition import window_of
from helpers.live_bytes import LiveBytes
from helpers.project import ROOT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from dilkit import Neighborhood, Pattern, alibi_slopes, dilated_attention
from dilkit.integrations import moozy
from dilkit.integrations.dilateformer import MultiDilatelocalAttention
from dilkit.integrations.moozy import MoozyBlock, replace_attention as replace_moozy
from dilkit.integrations.natten import (
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
    merge_attentions,
    na1d,
    na2d,
    na3d,
)
from dilkit.integrations.swin import ShiftedWindowAttention
from dilkit.integrations.titan import TitanAttention, replace_attention

NAT, DILATE = partial(NeighborhoodAttention2D, 6, 2), partial(MultiDilatelocalAttention, 12)


def by_masks(q, k, v, windows, more_keys, more_values, rpb=None):
    """`out` and `lse` over the cells in each cell's windows, and over further keys, by a mask of all pairs."""
    seen, entries = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    for axis, size in enumerate(windows.shape):
        near = torch.tensor([[j in window_of(windows, axis, i) for j in range(size)] for i in range(size)])
        seen = (seen[:, None, :, None] & near[:, None]).flatten(2).flatten(0, 1)
        reach, cells = windows.kernel_size[axis] - 1, torch.arange(size)
        offset = ((cells - cells[:, None]) // windows.dilation[axis]).clamp(-reach, reach) + reach
        entries = (entries[:, None, :, None] * (2 * reach + 1) + offset[:, None]).flatten(2).flatten(0, 1)
    grid = range(1, q.dim() - 2)
    q, k, v = (x.flatten(1, len(grid)) for x in (q, k, v))
    keys, values = (
        torch.cat(pair, 1).repeat_interleave(q.shape[2] // k.shape[2], 2) for pair in ((k, more_keys), (v, more_values))
    )
    seen = torch.cat([seen, seen.new_ones(len(seen), more_keys.shape[1])], 1)
    scores = torch.einsum("bihd,bjhd->bihj", q, keys) * q.shape[-1] ** -0.5
    if rpb is not None:
        scores = scores + rpb.flatten(1)[:, entries].transpose(0, 1)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return torch.einsum("bihj,bjhd->bihd", scores.softmax(-1), values), scores.logsumexp(-1)


def by_cells(layer, x):
    """The layer on maps that hold a window."""
    q, k, v = layer.qkv(x).unflatten(-1, (3, layer.num_heads, layer.head_dim)).unbind(3)
    windows = Neighborhood(x.shape[1:3], layer.kernel_size, layer.dilation, stride=layer.stride, causal=layer.is_causal)
    q, none = q * (layer.scale * layer.head_dim**0.5), q.flatten(1, 2)[:, :0]
    return layer.proj(by_masks(q, k, v, windows, none, none, layer.rpb)[0].reshape(x.shape))


WINDOWS = {
    na1d: dict(shape=(25,), kernel_size=8, stride=7, dilation=3),
    na2d: dict(shape=(9, 8), kernel_size=(4, 3), stride=(1, 2), dilation=(2, 1), causal=(False, True)),
    na3d: dict(shape=(5, 6, 4), kernel_size=(2, 4, 3), stride=(2, 3, 1), dilation=(2, 1, 1), causal=(True, False, False)),
}


@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("function", WINDOWS, ids=lambda function: function.__name__)
def test_functions_of_natten(function, more):
    fields = WINDOWS[function]
    sizes = [(*fields["shape"], heads, dim) for heads, dim in ((4, 8), (2, 8), (2, 6))] + [(more, 2, 8), (more, 2, 6)]
    tensors = [torch.randn(2, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    further = dict(zip(("additional_keys", "additional_values"), tensors[3:], strict=True)) if more else {}
    options = dict(is_causal=fields.get("causal", False), stride=fields["stride"], dilation=fields["dilation"], **further)
    results = function(*tensors[:3], fields["kernel_size"], return_lse=True, **options)
    right = [x.view_as(y) for x, y in zip(by_masks(*tensors[:3], Neighborhood(**fields), *tensors[3:]), results, strict=True)]
    assert_close(results, tuple(right), rtol=1e-9, atol=1e-9)
    weights, used = [torch.randn_like(x) for x in right], tensors if more else tensors[:3]
    assert_close(*(torch.autograd.grad(x, used, weights) for x in (results, right)), rtol=1e-9, atol=1e-9)


def test_rows_without_a_key_are_merged_to_nothing():
    outputs, lse = torch.zeros(2, 1, 3, 1, 2, requires_grad=True), torch.tensor([[-torch.inf] * 3, [-torch.inf, 0, 1]])
    lse = lse.view(2, 1, 3, 1).requires_grad_()
    merged, merged_lse = merge_attentions(list(outputs), list(lse))
    assert merged_lse.flatten().tolist() == [-torch.inf, 0, 1]
    torch.autograd.backward([merged, merged_lse[:, 1:]], [torch.ones_like(merged), torch.ones(1, 2, 1)])
    assert lse.grad.flatten().tolist() == [0, 0, 0, 0, 1, 1]


def unfolded(layer, x):
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


LAYERS = {
    "NAT": (partial(NAT, kernel_size=3), (4, 5)),
    "strides": (partial(NAT, kernel_size=4, stride=(3, 2)), (7, 5)),
    "DiNAT": (partial(NAT, kernel_size=3, dilation=2), (7, 6)),
    "sides apart": (partial(NAT, kernel_size=(5, 3), dilation=(1, 2), qk_scale=0.3), (5, 7)),
    "a window as large as the map": (partial(NAT, kernel_size=3), (3, 3)),
    "without biases": (partial(NAT, kernel_size=3, rel_pos_bias=False, qkv_bias=False), (4, 4)),
    "DilateFormer": (partial(DILATE, num_heads=6), (5, 4)),
    "one rate": (partial(DILATE, num_heads=2, qkv_bias=True, qk_scale=0.3, kernel_size=5, dilation=[2]), (3, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_cell_sees_its_neighbours_with_their_biases(name):
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
def test_maps_smaller_than_a_window_are_padded_after_their_last_cells(shape):
    layer = NAT(3, 2).double()
    nn.init.normal_(layer.qkv.bias)  # so that keys of padded cells are not 0
    x = torch.randn(1, *shape, 6, dtype=torch.float64)
    height, width = shape
    padded = F.pad(x, (0, 0, 0, max(0, 6 - width), 0, max(0, 6 - height)))
    assert_close(layer(x), by_cells(layer, padded)[:, :height, :width], rtol=1e-12, atol=1e-12)


def test_a_line_and_a_volume_are_maps_with_a_side_of_one_cell():
    line, flat = NeighborhoodAttention1D(6, 2, 3, 2), NAT((1, 3), (1, 2))
    solid = NeighborhoodAttention3D(6, 2, (1, 1, 3), (1, 1, 2))
    for layer, rpb in ((flat, line.rpb[:, None]), (solid, line.rpb[:, None, None])):
        layer.load_state_dict({**line.state_dict(), "rpb": rpb})
    x = torch.randn(2, 9, 6)
    assert_close(flat(x[:, None])[:, 0], line(x))
    assert_close(solid(x[:, None, None])[:, 0, 0], line(x))


@pytest.mark.parametrize("make", [partial(NAT, 3), partial(MultiDilatelocalAttention, 6, 3)])
def test_weights_are_dropped_in_training_alone(make):
    layer, x = make(attn_drop=0.5), torch.randn(1, 6, 6, 6)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_the_names_are_those_of_transformers_own_layer():
    dinat = pytest.importorskip("transformers.models.dinat.modeling_dinat", reason="transformers is not installed")
    theirs = dinat.NeighborhoodAttentionModule(dinat.DinatConfig(), 6, 2, kernel_size=3, dilation=2)
    layer = NAT(3, 2)
    model = nn.ModuleDict({"attention": layer})
    model.load_state_dict({f"attention.{name}": value for name, value in theirs.state_dict().items()})
    assert torch.equal(layer.rpb, theirs.self.rpb)
    assert torch.equal(layer.qkv.weight, torch.cat([getattr(theirs.self, name).weight for name in ("query", "key", "value")]))
    assert torch.equal(layer.proj.bias, theirs.output.dense.bias)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"attention.self.query.weight": torch.zeros(6, 6)})


def swin_by_definition(layer, x):
    """The windows of a rolled map of three windows a side, of which rolled parts do not see each other."""
    (side, _), (step, _), (batch, size, _, dim) = layer.window_size, layer.shift_size, x.shape
    padded = F.pad(x, (0, 0, 0, 2, 0, 2))
    rolled = (torch.arange(size + 2) - step) % (size + 2)
    part, place = 2 * (rolled // side) + (rolled >= size + 2 - step), rolled % side
    places, parts = (torch.cartesian_prod(one, one) for one in (place, part))
    offset = places[:, None] - places + side - 1
    bias = layer.relative_position_bias_table[
        (offset * torch.tensor([2 * side - 1, 1])).sum(-1).clamp(0, (2 * side - 1) ** 2 - 1)
    ]
    apart = (parts[:, None] != parts).any(-1)
    q, k, v = layer.qkv(padded).flatten(1, 2).unflatten(-1, (3, layer.num_heads, -1)).unbind(2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * layer.head_dim**-0.5 + bias.permute(2, 0, 1)
    out = torch.einsum("bhij,bjhd->bihd", scores.masked_fill(apart, -torch.inf).softmax(-1), v)
    return layer.proj(out.reshape(batch, size + 2, size + 2, dim))[:, :size, :size]


@pytest.mark.parametrize("step", [0, 2])
def test_swin_is_its_definition(step):
    layer, x = ShiftedWindowAttention(12, 3, 4, step).double(), torch.randn(2, 10, 10, 12).double()
    index = {"relative_position_index": torch.zeros(16, 16)}
    layer.load_state_dict(layer.state_dict() | index)
    both = [layer(x), swin_by_definition(layer, x)]
    assert_close(*both, rtol=1e-11, atol=1e-11)
    weights, dout = list(layer.parameters()), torch.randn_like(x)
    assert_close(*(torch.autograd.grad(out, weights, dout) for out in both), rtol=1e-10, atol=1e-10)
    torch.export.export(layer, (x[:, :3, :9],), strict=False)
    assert type(layer(x[:, :3, :9])) is Tensor  # whose windows are not those of the export, which have no numbers


class PlainAttention(nn.Module):
    """A block's attention as TITAN defines it, with a matrix `(batch, heads, 1 + tiles, 1 + tiles)`."""

    def __init__(self, pos_encode="alibi", attn_drop=0.0, norm=False):
        super().__init__()
        self.num_heads, self.head_dim, self.pos_encode, self.attn_drop_prob = 3, 4, pos_encode, attn_drop
        self.qkv, self.proj, self.proj_drop = nn.Linear(12, 36), nn.Linear(12, 12), nn.Dropout(0.0)
        self.q_norm, self.k_norm = (nn.LayerNorm(4) if norm else nn.Identity() for _ in range(2))

    def forward(self, x, attn_bias, bg_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", self.q_norm(q), self.k_norm(k)) / 2 + attn_bias
        if bg_mask is not None and len(x) > 1:
            seen = torch.cat([torch.ones(len(x), 1, dtype=torch.bool), bg_mask.flatten(1)], 1)
            both = (seen[:, :, None] & seen[:, None]) | torch.eye(x.shape[1], dtype=torch.bool)
            scores = scores.masked_fill(~both[:, None], -torch.inf)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
        return self.proj_drop(self.proj(out))


def matrix(coordinates):
    batch, tiles, _ = coordinates.shape
    bias = torch.zeros(batch, 3, 1 + tiles, 1 + tiles, dtype=coordinates.dtype)
    bias[:, :, 1:, 1:] = -alibi_slopes(3).to(bias)[:, None, None] * torch.cdist(coordinates, coordinates)[:, None]
    return bias


class PlainEncoder(nn.Module):
    """Slide encoder with the module names that `replace_attention` looks for, which passes the bias to its blocks."""

    def __init__(self, pos_encode="alibi"):
        super().__init__()
        self.pos_encode_type, self.blocks = pos_encode, nn.Module()
        self.blocks.modules_list = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(12)}) for _ in range(2))
        for block in self.blocks.modules_list:
            block.attn = PlainAttention(pos_encode)
        self.local_alibi, self.local_alibi_status = self.get_alibi(6, 6), True

    def get_alibi(self, w, h, bg_mask=None):
        cells = torch.tensor([(x, y) for x in range(w) for y in range(h)], dtype=torch.float32)
        return matrix((cells if bg_mask is None else cells[bg_mask.flatten()])[None])

    def forward_features(self, grid, bg_mask):
        batch, w, h, dim = grid.shape
        bias = self.get_alibi(w, h, bg_mask) if batch == 1 else self.get_alibi(w, h)
        bias = bias.repeat(batch, 1, 1, 1).type(grid.dtype)
        tokens = grid[bg_mask][None] if batch == 1 else grid.flatten(1, 2)
        x = torch.cat([torch.ones(batch, 1, dim), tokens], 1)
        for block in self.blocks.modules_list:
            x = x + block.attn(block["norm"](x), attn_bias=bias, bg_mask=bg_mask)
        return x


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_attention_with_the_matrix_of_all_pairs(masked):
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


def test_a_slide_without_tiles_is_its_class_token():
    plain, x = PlainAttention().double(), torch.randn(2, 5, 12, dtype=torch.float64)
    attention, coordinates, nothing = TitanAttention.of(plain), torch.rand(1, 4, 2), torch.zeros(2, 4, dtype=torch.bool)
    assert_close(attention(x, coordinates, nothing), plain(x, matrix(coordinates), nothing))
    assert_close(attention(x[:, :1], coordinates[:, :0]), plain(x[:, :1], torch.zeros(1)))


def test_less_memory_than_that_of_a_matrix_of_all_pairs():
    x, coordinates = torch.randn(1, 501, 12, requires_grad=True), torch.rand(1, 500, 2)
    with LiveBytes(x) as live:
        TitanAttention.of(PlainAttention())(x, coordinates).sum().backward()
    assert live.peak < 3 * 500**2 * 4


class PlainBlock(nn.Module):
    """A block of MOOZY as it defines it, with a matrix of all pairs and two registers."""

    def __init__(self, attn_drop=0.0):
        super().__init__()
        self.head_dim, self.attn_drop_prob = 4, attn_drop
        for name in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"):
            setattr(self, name, nn.Linear(12, 12))
        self.norm1, self.norm2, self.q_norm, self.k_norm = nn.LayerNorm(12), nn.LayerNorm(12), nn.LayerNorm(4), nn.LayerNorm(4)
        self.activation, self.mlp_dropout, self.drop_path, self.ls_attn, self.ls_mlp = nn.GELU(), *(nn.Identity(),) * 4
        self.pos_bias = nn.Module()
        self.pos_bias.slopes = nn.Parameter(-torch.rand(3, 1))

    def forward(self, x, positions, attn_mask, patch_sizes, num_registers):
        normed, heads = self.norm1(x), (-1, self.head_dim)
        query, key, value = (part(normed).unflatten(-1, heads).mT for part in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("bidh,bjdh->bhij", self.q_norm(query.mT).mT, self.k_norm(key.mT).mT) / 2
        bias = self.pos_bias.slopes[:, :, None] * (torch.cdist(positions, positions) / patch_sizes[:, None, None])[:, None]
        bias[:, :, : 1 + num_registers] = bias[..., : 1 + num_registers] = 0
        out = torch.einsum("bhij,bjdh->bihd", (scores + bias + attn_mask).softmax(-1), value)
        x = x + self.out_proj(out.flatten(2))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


def test_moozy_with_registers_background_and_learned_slopes(monkeypatch):
    model = nn.Sequential(PlainBlock()).double()
    changed = copy.deepcopy(model)
    replace_moozy(changed)
    assert list(changed.state_dict()) == list(model.state_dict())
    x, positions = torch.randn(2, 3 + 9, 12).double(), torch.randint(0, 4096, (2, 12, 2)).double()
    valid = torch.cat([torch.ones(2, 3).bool(), torch.rand(2, 9) < 0.6], 1)
    seen = (valid[:, :, None] & valid[:, None]) | torch.eye(12).bool()
    mask = torch.zeros(2, 1, 12, 12).double().masked_fill(~seen[:, None], torch.finfo(torch.float64).min)
    given = x, positions, mask, torch.tensor([448.0, 512.0]).double(), 2
    both = [layer[0](*given) for layer in (model, changed)]
    assert_close(*both, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(moozy, "CHUNK", 5)  # rows of the feed-forward network at a time
    with torch.no_grad():
        assert_close(changed[0](*given), both[0], rtol=1e-9, atol=1e-9)
    sizes = torch.tensor([0.75, 512.0]).double()  # of positions that are integers, too
    in_pixels = [layer[0](x, places, mask, sizes, 2) for layer, places in ((model, positions), (changed, positions.long()))]
    assert_close(*in_pixels, rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(x)
    assert_close(*(torch.autograd.grad(out, list(m.parameters()), dout) for out, m in zip(both, (model, changed), strict=True)))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_is_changed_to_it_with_its_state_dict(batch):
    model = nn.Module()
    model.vision_encoder = encoder = PlainEncoder()
    grid, mask, names = torch.randn(batch, 3, 4, 12), torch.rand(batch, 3, 4) < 0.7, list(model.state_dict())
    before = encoder.forward_features(grid, mask)
    for _ in range(2):  # a second time it stays as it is
        replace_attention(model)
        assert_close(encoder.forward_features(grid, mask), before, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    assert (encoder.local_alibi.shape, encoder.local_alibi_status) == ((1, 1, 36, 2), False)


def test_the_matrix_that_slide2vec_makes_is_left_out(monkeypatch):
    encoder, grid, mask = PlainEncoder(), torch.randn(1, 3, 4, 12), torch.rand(1, 3, 4) < 0.7
    before, orig_forward_features = encoder.forward_features(grid, mask), PlainEncoder.forward_features

    def forward_features(self, grid, bg_mask):
        assert orig_forward_features is None, "the matrix of all pairs"
        return grid

    monkeypatch.setattr(sys.modules[__name__], "_slide2vec_titan_patched", True, raising=False)
    monkeypatch.setattr(PlainEncoder, "forward_features", forward_features)
    replace_attention(encoder)
    assert_close(encoder.forward_features(grid, mask), before, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(PlainEncoder, "forward_features", lambda self: None)
    with pytest.raises(ValueError, match="of an unknown version; replace_attention before it"):
        replace_attention(PlainEncoder())


MAPS, SLIDES = (
    [(torch.randn(1, n, 6, 6),) for n in (5, 2, 7, 8)],
    [(torch.randn(2, 1 + n, 12), torch.rand(2, n, 2)) for n in (5, 9)],
)
COMPILED = [(NAT(3), MAPS), (MultiDilatelocalAttention(6, 3), MAPS), (TitanAttention(12, 3), SLIDES)]


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "inputs"), COMPILED, ids=lambda x: type(x).__name__)
def test_compiled_it_is_the_same_for_every_size(layer, inputs):
    compiled = torch.compile(layer, fullgraph=isinstance(layer, TitanAttention), backend="eager")
    for tensors in inputs:
        assert_close(compiled(*tensors), layer(*tensors))


def tiles_of(*shape, **options):
    return lambda: TitanAttention(12, 3)(torch.randn(2, 5, 12), torch.zeros(shape), **options)


def hooked():
    module = PlainAttention()
    module.register_forward_hook(lambda *call: None)
    return module


MAP = torch.randn(1, 4, 5, 2, 4)
REFUSED = {
    "heads": (lambda: NeighborhoodAttention2D(6, 4, 3), "dim=6 is not divisible by num_heads=4"),
    "a stride beyond a window": (lambda: NAT(3, stride=4), r"stride=\(4, 4\) is more than kernel_size=\(3, 3\)"),
    "a map for a line": (lambda: na1d(MAP, MAP, MAP, 3), r"query has shape \(1, 4, 5, 2, 4\); \(batch, 1 sizes of a grid"),
    "keys of another map": (lambda: na2d(MAP, MAP.transpose(1, 2), MAP, 3), r"\(1, 5, 4, 2, 4\), .* of one grid are"),
    "keys without values": (lambda: na2d(MAP, MAP, MAP, 3, additional_keys=MAP[:, 0]), "additional_values is None; both or"),
    "one result to merge": (lambda: merge_attentions([MAP], [MAP]), "1 outputs and 1 lse_tensors; two or more"),
    "three sides": (lambda: NAT((3, 3, 3)), r"kernel_size=\(3, 3, 3\) has 3 dimensions; 2 are"),
    "a list of tokens": (lambda: NAT(3)(torch.randn(1, 9, 6)), r"x has shape \(1, 9, 6\); \(batch, 2"),
    "another width": (lambda: NAT(3)(torch.randn(1, 3, 3, 8)), r"dim=6\) is needed"),
    "other heads": (lambda: DILATE(5), "dim=12 is not divisible by num_heads=5"),
    "groups": (lambda: DILATE(4), r"heads=4 cannot be divided into equal groups, one for each of dilations=\(1, 2, 3\)"),
    "an even window of DilateFormer": (lambda: DILATE(3, kernel_size=4), r"kernel_size=\(4, 4\): 4 is even"),
    "channels first": (lambda: DILATE(3)(torch.randn(1, 12, 4, 4)), r"\(1, 12, 4, 4\); \(batch, height"),
    "a shift of a window": (lambda: ShiftedWindowAttention(12, 3, 4, 4), r"shift_size=\(4, 4\) must be less than window_size"),
    "a map of Swin": (lambda: ShiftedWindowAttention(12, 3, 4)(torch.randn(1, 9, 12)), r"\(batch, 2 sizes of a map, dim=12"),
    "a matrix": (tiles_of(2, 3, 5, 5), r"attn_bias has shape \(2, 3, 5, 5\); the coordinates of the tiles, \(2 or 1"),
    "of other tiles": (tiles_of(2, 5, 2), r"\(2 or 1, 4, 2\), are needed"),
    "rounded": (
        lambda: TitanAttention(12, 3)(torch.randn(2, 5, 12), torch.full((2, 4, 2), 256).bfloat16()),
        "attn_bias is torch.bfloat16, which rounds coordinates from 256 on",
    ),
    "dropout of MOOZY": (lambda: MoozyBlock(PlainBlock(attn_drop=0.1)), "attn_drop_prob=0.1 of the block"),
    "dropout": (lambda: TitanAttention.of(PlainAttention(attn_drop=0.1)), "attn_drop_prob=0.1"),
    "a hook": (lambda: TitanAttention.of(hooked()), "with hooks .*which would be lost; register hooks"),
    "another encoding": (lambda: replace_attention(PlainEncoder("abs")), "pos_encode='abs'"),
    "heads of TITAN": (lambda: TitanAttention(12, 5), "dim=12 is not divisible by num_heads=5"),
    "another mask": (tiles_of(2, 4, 2, bg_mask=torch.ones(2, 5).bool()), r"bg_mask is .*\(2, 5\); bool \(2, 4\) is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, text = REFUSED[name]
    with pytest.raises(TypeError if name == "rounded" else ValueError, match=text):
        call()


def test_one_made_on_the_meta_device():
    with torch.device("meta"):
        made = TitanAttention(12, 3)
    assert torch.equal(made.to_empty(device="cpu").slopes, alibi_slopes(3))


PAGE = (ROOT / "docs" / "migrating.md").read_text()


def on_the_page(language, word, **names):
    (code,) = [code for code in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if word in code]
    exec(code, names)
    return names


def attention(q, k, v, is_causal=False):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal).transpose(1, 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_in_groups_with_a_branch_each(is_causal):
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


def test_one_branch_of_one_head():
    """The first of every 2 tokens of a segment of 16 attend to each other, as one head."""
    projections = {f"proj_{name}": nn.Linear(32, 32, dtype=torch.float64) for name in "qkv"}
    layer = SimpleNamespace(segment_size=16, dilation_rate=2, **projections)
    x = torch.randn(2, 64, 32, dtype=torch.float64)
    rows = x.unflatten(1, (-1, 16))[:, :, ::2]
    right = F.scaled_dot_product_attention(layer.proj_q(rows), layer.proj_k(rows), layer.proj_v(rows)).flatten(1, 2)
    names = dict(layer=layer, x=x, Pattern=Pattern, dilated_attention=dilated_attention)
    assert_close(on_the_page("py", "layer.proj_q", **names)["out"], right, rtol=1e-12, atol=1e-12)
