"""A model of Llama's shape with random weights: RMS norms, rotary positions, grouped heads, a SwiGLU network, no biases.

tokens -> embedding -> 8 x [x + attention(norm(x)), x + down(silu(gate(norm x)) * up(norm x))] -> norm -> logits of the last row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit import dilated_attention
from dilkit.pattern import Pattern
from dilkit.rotary import rotary_embedding

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of `(batch, seq, heads, head_dim)` to keys and values with fewer heads; the result like the queries."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; a head has `width // heads` numbers."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 1376
    vocabulary: int = 32000


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        linear, keys = partial(nn.Linear, bias=False), config.kv_heads * self.head_dim
        self.input_norm, self.norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.query, self.out = linear(config.width, config.width), linear(config.width, config.width)
        self.key, self.value = linear(config.width, keys), linear(config.width, keys)
        self.gate, self.up = linear(config.width, config.hidden), linear(config.width, config.hidden)
        self.down = linear(config.hidden, config.width)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        """`x` `(batch, seq, width)` after the layer, written over it: without gradients nothing of a layer has to be kept."""
        rows = self.input_norm(x)
        query, key, value = (one(rows).unflatten(-1, (-1, self.head_dim)) for one in (self.query, self.key, self.value))
        x += self.out(attend(rotary_embedding(query), rotary_embedding(key), value).flatten(2))
        rows = self.norm(x)
        x += self.down(F.silu(self.gate(rows), inplace=True).mul_(self.up(rows)))
        return x


class Llama(nn.Module):
    """The model, with the same weights whenever it is made."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.logits = nn.RMSNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, attend: Attention) -> Tensor:
        """Logits `(batch, vocabulary)` of what follows on `tokens` `(batch, seq)`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, attend)
        logits: Tensor = self.logits(self.norm(x[:, -1]))
        return logits


def dilated(pattern: Pattern, backend: str | None = None) -> Attention:
    """Attention of dilkit."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Any = dilated_attention(query, key, value, pattern, is_causal=True, backend=backend)
        return torch.as_tensor(out)

    return attend


def without(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """No attention: what is left is the time of the rest of the model."""
    return query


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of torch. Keys and values are repeated for the queries of a group: then its fused kernel takes them."""
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
