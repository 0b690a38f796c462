"""LongNet's layer as its procedure was published, and checkouts of those who use it."""

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit.integrations.torchscale.install import pattern_of
from dilkit.integrations.torchscale.proving import plain_attention, spare_flash_attention
from dilkit.oracle import oracle_attention

PUBLISHED = "published.torchscale.component.dilated_attention"
CHECKOUTS = {
    "torchscale": ("DILKIT_TORCHSCALE", "torchscale.component.dilated_attention"),
    "gigapath": ("DILKIT_GIGAPATH", "gigapath.torchscale.component.dilated_attention"),
}


class DilatedAttention(nn.Module):
    def __init__(self, args, embed_dim: int, num_heads: int, dropout: float = 0.0, subln: bool = False, **kind: bool):
        super().__init__()
        self.args, self.embed_dim, self.num_heads, self.head_dim = args, embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.xpos = dropout, None
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim))
        self.inner_attn_ln = nn.LayerNorm(embed_dim, eps=args.layernorm_eps) if subln else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state=None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        inputs = zip((query, key, value), (self.q_proj, self.k_proj, self.v_proj), strict=True)
        q, k, v = (project(x).unflatten(2, (self.num_heads, self.head_dim)) for x, project in inputs)
        pairs = list(zip(self.args.segment_length, self.args.dilated_ratio, strict=False))
        branches = [self.branch(q, k, v, min(w, q.shape[1]), r, is_causal) for w, r in pairs]
        lses = torch.stack([lse for _, lse in branches])
        weights = lses.masked_fill((lses == -math.inf).all(0), 0.0).softmax(0).detach()
        out = sum((w[..., None].to(q.dtype) * out for w, (out, _) in zip(weights, branches, strict=True)), torch.zeros_like(q))
        out = out.flatten(2)
        return self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out)), None

    def branch(self, q: Tensor, k: Tensor, v: Tensor, w: int, r: int, is_causal: bool) -> tuple[Tensor, Tensor]:
        batch, rows, heads, _ = q.shape
        segments, group = math.ceil(rows / w), math.ceil(heads / r)
        cut = (F.pad(x, (0, 0, 0, 0, 0, segments * w - rows)).reshape(batch * segments, w, *x.shape[2:]) for x in (q, k, v))
        padded = [F.pad(x, (0, 0, 0, 0, 0, -w % r)) for x in cut]
        out, of_lse = torch.zeros_like(padded[0]), torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(padded[0].shape[:3], -math.inf, dtype=of_lse)
        for offset, first in enumerate(range(0, heads, group)):
            part = slice(first, first + group)
            out[:, offset::r, part], found = plain_attention(*(x[:, offset::r, part] for x in padded), is_causal)
            lse[:, offset::r, part] = found.transpose(1, 2)
        return tuple(x[:, :w].reshape(batch, segments * w, *x.shape[2:])[:, :rows] for x in (out, lse))


def by_the_oracle(made, x: Tensor, **options) -> Tensor:
    """Compute the layer with one softmax over all keys, explicit zero keys included."""
    q, k, v = (project(x).unflatten(2, (made.num_heads, -1)) for project in (made.q_proj, made.k_proj, made.v_proj))
    if made.xpos is not None:
        q, k = (torch.stack([made.xpos(h, downscale=down) for h in x.unbind(2)], 2) for x, down in ((q, False), (k, True)))
    out, _ = oracle_attention(q, k, v, pattern_of(made, "zeros"), **options)
    return made.out_proj(made.inner_attn_ln(out.flatten(2)))


def unavailable(peer: str) -> str:
    """Why `peer` cannot be had here; empty where it can."""
    if peer == "published":
        return ""
    variable = f"DILKIT_{peer.upper()}"
    if not os.environ.get(variable):
        return f"{variable} names no checkout of {peer}: make peers DIR=<checkout>"
    return "" if importlib.util.find_spec("einops") else f"einops, which {peer} imports, is not installed (dilkit[peers])"


PEERS = [peer for peer in ("published", *CHECKOUTS) if not unavailable(peer)]
"""Peers that can be had here: tests of whole models say what is missing."""


@contextmanager
def loaded(peer: str) -> Iterator[type[Any]]:
    """Load the peer's class on a CPU without flash-attn, and forget its modules afterwards."""
    before = set(sys.modules)
    try:
        yield _published() if peer == "published" else _of_checkout(*CHECKOUTS[peer])
    finally:
        for name in set(sys.modules) - before:
            if "torchscale" in name or name.partition(".")[0] == "gigapath":
                del sys.modules[name]


def _published() -> type[Any]:
    module = ModuleType(PUBLISHED)
    module.DilatedAttention = type("DilatedAttention", (DilatedAttention,), {"forward": DilatedAttention.forward})
    sys.modules[PUBLISHED] = module
    return module.DilatedAttention


def _of_checkout(variable: str, name: str) -> type[Any]:
    folder = str(Path(os.environ[variable]).resolve())
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(folder)
    spare_flash_attention(name)
    return module.DilatedAttention
