"""One layer of the slide encoder: attention and feed-forward network, each with a norm before and inside it (sub-LN).

Rows are packed: `(rows, embed_dim)`, one slide after the other, `lengths[i]` rows of slide i. Only attention sees slides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit.pattern import Pattern
from dilkit.weights import attention_rows

EPS = 1e-5
CHUNK = 2048
"""Rows that are computed at a time, after attention, where no gradients are wanted: hidden rows are 4 times as wide."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention on `(batch, rows, heads, head_dim)`."""


class SelfAttention(nn.Module):
    """`out_proj(inner_attn_ln(attention(q_proj(x), k_proj(x), v_proj(x))))`."""

    def __init__(self, embed_dim: int, num_heads: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.k_proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.v_proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.q_proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.inner_attn_ln = nn.LayerNorm(embed_dim, eps=EPS, **factory)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (len(x), self.num_heads, x.shape[1] // self.num_heads)
        return self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)

    def first_row(self, x: Tensor, pattern: Pattern) -> Tensor:
        """Compute attention of the first row of one slide: `(1, embed_dim)`, the heads side by side."""
        rows, dim = x.shape
        shape = (1, rows, self.num_heads, dim // self.num_heads)
        key, value = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        query = self.q_proj(x[:1]).view(1, 1, *shape[2:]).expand(shape)  # attention_rows reads the first row alone
        weights = attention_rows(query, key, pattern, [0])
        return torch.einsum("bhms,bshd->bmhd", weights, value.to(weights.dtype)).to(x.dtype).reshape(1, dim)

    def projected(self, x: Tensor) -> Tensor:
        out: Tensor = self.out_proj(self.inner_attn_ln(x))
        return out


class FeedForward(nn.Module):
    """`fc2(ffn_layernorm(gelu(fc1(x))))`."""

    def __init__(self, embed_dim: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, 4 * embed_dim, **factory)
        self.fc2 = nn.Linear(4 * embed_dim, embed_dim, **factory)
        self.ffn_layernorm = nn.LayerNorm(4 * embed_dim, eps=EPS, **factory)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.ffn_layernorm(F.gelu(self.fc1(x))))
        return out


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); `drop_path` leaves a slide's summand out in training."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, drop_path: float, factory: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = SelfAttention(embed_dim, num_heads, factory)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim, eps=EPS, **factory)
        self.ffn = FeedForward(embed_dim, factory)
        self.final_layer_norm = nn.LayerNorm(embed_dim, eps=EPS, **factory)
        self.dropout, self.drop_path = dropout, drop_path

    def forward(self, x: Tensor, lengths: Sequence[int], attention: Attention, factors: Tensor | None = None) -> Tensor:
        """Apply the layer to packed rows; `factors` of both summands are those of `draw`, None for 1."""
        parts = list(_of_one_length(lengths))
        if self.training or torch.is_grad_enabled() or factors is not None or len(x) <= CHUNK:
            seen = [self._seen(x[rows], length, attention) for rows, length in parts]
            of_rows = () if factors is None else factors.repeat_interleave(torch.tensor(lengths, device=x.device), dim=1)
            return self._rows(x, torch.cat(seen) if len(seen) > 1 else seen[0], *of_rows)
        out = torch.empty_like(x)
        for rows, length in parts:
            of_slides = out[rows], x[rows], self._seen(x[rows], length, attention)
            for result, *chunk in zip(*(torch.split(one, CHUNK) for one in of_slides), strict=True):
                result.copy_(self._rows(*chunk))
        return out

    def first_rows(self, x: Tensor, lengths: Sequence[int], pattern: Pattern, factors: Tensor | None = None) -> Tensor:
        """Compute the first row of each slide, `(slides, embed_dim)`: pooling the class token reads no other."""
        slides = torch.split(x, list(lengths))
        seen = torch.cat([self.self_attn.first_row(self.self_attn_layer_norm(rows), pattern) for rows in slides])
        return self._rows(torch.cat([rows[:1] for rows in slides]), seen, *(() if factors is None else factors))

    def _seen(self, x: Tensor, length: int, attention: Attention) -> Tensor:
        heads = self.self_attn.heads(self.self_attn_layer_norm(x))
        return attention(*(one.view(-1, length, *one.shape[1:]) for one in heads)).view(x.shape)

    def _rows(self, x: Tensor, seen: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        """Compute rows, with factors `(rows, 1)` of both summands: no row depends on another."""
        x = x + self._dropped(self.self_attn.projected(seen), first)
        return x + self._dropped(self.ffn(self.final_layer_norm(x)), second)

    def draw(self, x: Tensor, slides: int) -> Tensor | None:
        """Draw the factors of both summands of each slide in training, `(2, slides, 1)`: 0, or what makes up for that."""
        if not self.training or self.drop_path == 0:
            return None
        return x.new_empty(2, slides, 1).bernoulli_(1 - self.drop_path).div(1 - self.drop_path)

    def _dropped(self, x: Tensor, factor: Tensor | None) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        return x if factor is None else x * factor

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, drop_path={self.drop_path:.3g}"


def _of_one_length(lengths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    start = 0
    for length, slides in groupby(lengths):
        stop = start + length * sum(1 for _ in slides)
        yield slice(start, stop), length
        start = stop
