"""TITAN's attention beside one with the matrix of all pairs: results, gradients, masks, memory, and models changed to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.live_bytes import LiveBytes
from torch import Tensor, nn
from torch.testing import assert_close

from dilkit import alibi_slopes
from dilkit.integrations.titan import TitanAttention, replace_attention


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
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]


def matrix(coordinates: Tensor) -> Tensor:
    """`(batch, heads, 1 + tiles, 1 + tiles)` of `(batch, tiles, 2)`: no bias in the row and the column of the class token."""
    batch, tiles, _ = coordinates.shape
    bias = torch.zeros(batch, 3, 1 + tiles, 1 + tiles, dtype=coordinates.dtype)
    bias[:, :, 1:, 1:] = -alibi_slopes(3).to(bias)[:, None, None] * torch.cdist(coordinates, coordinates)[:, None]
    return bias


class PlainEncoder(nn.Module):
    """What there is around the attention: the names that `replace_attention` goes by, and the way of the bias."""

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
        """Of `(batch, w, h, dim)` and `(batch, w, h)`; of one slide without the tokens of its background."""
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
    model: Any = nn.Module()
    model.vision_encoder = encoder = PlainEncoder()
    grid, mask, names = torch.randn(batch, 3, 4, 12), torch.rand(batch, 3, 4) < 0.7, list(model.state_dict())
    before = encoder.forward_features(grid, mask)
    for _ in range(2):  # a second time it stays as it is
        replace_attention(model)
        assert_close(encoder.forward_features(grid, mask), before, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    assert (encoder.local_alibi.shape, encoder.local_alibi_status) == ((1, 1, 36, 2), False)


@pytest.mark.slow
def test_one_graph_is_compiled_of_it() -> None:
    attention = TitanAttention.of(PlainAttention())
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    for tiles in (5, 9, 12):
        x, coordinates = torch.randn(2, 1 + tiles, 12), torch.rand(2, tiles, 2)
        assert_close(compiled(x, coordinates), attention(x, coordinates))


def tiles_of(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A call with coordinates of this shape."""
    return lambda: TitanAttention(12, 3)(torch.randn(2, 5, 12), torch.zeros(shape, dtype=dtype), **options)


def hooked() -> nn.Module:
    module = PlainAttention()
    module.register_forward_hook(lambda *call: None)
    return module


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a matrix": (tiles_of(2, 3, 5, 5), ValueError, r"attn_bias has shape \(2, 3, 5, 5\); the coordinates of the tiles, \(2 or 1"),
    "of other tiles": (tiles_of(2, 5, 2), ValueError, r"\(2 or 1, 4, 2\), are needed"),
    "rounded": (tiles_of(2, 4, 2, dtype=torch.bfloat16), TypeError, "attn_bias is torch.bfloat16, which rounds coordinates"),
    "dropout": (lambda: TitanAttention.of(PlainAttention(attn_drop=0.1)), ValueError, "attn_drop_prob=0.1"),
    "a hook": (lambda: TitanAttention.of(hooked()), ValueError, "with hooks .*which would be lost; register hooks"),
    "another encoding": (lambda: replace_attention(PlainEncoder("abs")), ValueError, "pos_encode='abs'"),
    "heads": (lambda: TitanAttention(12, 5), ValueError, "dim=12 is not divisible by num_heads=5"),
    "another mask": (tiles_of(2, 4, 2, bg_mask=torch.ones(2, 5).bool()), ValueError, r"bg_mask is .*\(2, 5\); bool \(2, 4\) is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


def test_one_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        made = TitanAttention(12, 3)
    assert torch.equal(made.to_empty(device="cpu").slopes, alibi_slopes(3))
