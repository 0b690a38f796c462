"""Modules with their heads over ranks, held to the same on one rank: what the ranks of `head_parallel_rank.py` go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dilkit import BlockSparse, DilatedAttention, MultiheadDilatedAttention, Pattern, SlidingWindow, order
from dilkit.nn import HeadParallel
from dilkit.nn.in_projection import lay_out

BATCH, SEQ, EMBED, HEADS = 2, 40, 32, 8
LAYOUTS = torch.rand(HEADS, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.6
SEGMENTS = [8, 16, 64], [1, 2, 4]
MODULO, BLOCK, ZEROS = Pattern(*SEGMENTS), Pattern(*SEGMENTS, "block"), Pattern(*SEGMENTS, tail="zeros")
RANGES = Pattern(*SEGMENTS, heads=[(0, 3), None, (1, 7)])
BLOCKS = Pattern.of(BlockSparse(LAYOUTS, 8), SlidingWindow(5, heads=(1, 6)))
FEW = Pattern(*SEGMENTS, heads=[(0, 2), (0, 1), (0, 2)])  # heads of later ranks see nothing
WINDOW = Pattern.of(SlidingWindow(9))
ORDERS = [order((5, 8)), order((5, 8), "snake"), order((5, 8), "morton")]

LAYERS: dict[str, tuple[DilatedAttention, dict[str, Any]]] = {
    "modulo": (DilatedAttention(MODULO), dict(rotary=True, is_causal=True)),
    "block, grouped": (DilatedAttention(BLOCK), dict(num_kv_heads=4, sink=True)),
    "ranges": (DilatedAttention(RANGES), dict(layer_norm=True, bias=False)),
    "blocks by head": (DilatedAttention(BLOCKS), dict(kdim=24, vdim=20, layer_norm=True)),
    "nothing seen": (DilatedAttention(FEW), dict(sink=True, num_kv_heads=4)),
    "dropout": (DilatedAttention(MODULO), dict(dropout=0.3, num_kv_heads=4)),
    "dropout, alike": (DilatedAttention(WINDOW), dict(dropout=0.3)),
    "orders, alike": (DilatedAttention(WINDOW, orders=ORDERS), {}),
    "tails": (DilatedAttention(ZEROS), {}),
}
"""The inner attention and options of a layer."""
BARE: dict[str, tuple[Pattern, int, dict[str, Any]]] = {
    "modulo": (MODULO, HEADS, {}),
    "block, grouped": (BLOCK, 4, dict(is_causal=True)),
    "ranges": (RANGES, 4, {}),
    "blocks by head": (BLOCKS, HEADS, {}),
    "dropout, alike": (WINDOW, 4, dict(dropout_p=0.3)),
    "alike": (WINDOW, HEADS, {}),
}
"""The pattern of an inner attention, its number of key/value heads, and options of its call."""
HALVES = "block, grouped", "blocks by head", "modulo"
"""Those that two ranks try in bfloat16; more ranks try all."""
PLAN = dict(q=ColwiseParallel(), k=ColwiseParallel(), v=ColwiseParallel(), inner=HeadParallel(), out=RowwiseParallel())


class Bare(nn.Module):
    """Projections of its own around an inner attention."""

    def __init__(self, inner: nn.Module, kv_heads: int, options: dict[str, Any]) -> None:
        super().__init__()
        width = kv_heads * EMBED // HEADS
        self.q, self.v, self.out = nn.Linear(EMBED, EMBED), nn.Linear(EMBED, width), nn.Linear(EMBED, EMBED)
        self.k = nn.Linear(EMBED, width, bias=False)  # a bias would get a gradient of nothing but rounding
        self.inner, self.options = inner, options

    def forward(self, x: Tensor) -> Tensor:
        rows = (project(x).unflatten(-1, (-1, EMBED // HEADS)) for project in (self.q, self.k, self.v))
        attended: Tensor = self.inner(*rows, **self.options)
        return self.out(attended.flatten(-2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A model with `MultiheadDilatedAttention` in it."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.attn = MultiheadDilatedAttention(EMBED, HEADS, inner, **options)

    def forward(self, *x: Tensor) -> Tensor:
        out: Tensor = self.attn(*x)[0]
        return out


def whole(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Parameters, or their gradients, each of all ranks."""
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}


def drawn(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same module on every rank, with parameters that are not 0."""
    torch.manual_seed(0)
    made = make()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.to(dtype)


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Compare by the norm: sums that cancel have no precision of their own."""
    limit = 1e-5 if expected.dtype == torch.float32 else 3e-2
    size, apart = (torch.linalg.vector_norm(x.detach().double()).item() for x in (expected, found - expected))
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}"
    assert apart <= limit * size, f"{what}: {apart:.3g} apart at a size of {size:.3g}"


def trained(model: nn.Module, inputs: list[Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
    """Logits and gradients of inputs, and of parameters, in the first of two steps that are made."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1.0)  # a small one makes steps of gradients that are rounding
    first: Any = None
    for step in range(2):
        leaves = [x.clone().requires_grad_() for x in inputs]
        torch.manual_seed(step)  # of dropped weights
        out = model(*leaves)
        optimizer.zero_grad()
        (out * torch.rand(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)).sum().backward()
        first = first or ([out.detach(), *(x.grad for x in leaves)], gradients(model))
        optimizer.step()
    return first  # type: ignore[no-any-return]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of the parameters, each of all ranks, by the names of one rank."""
    found = whole({name: p.grad for name, p in model.named_parameters()})
    if "attn.k_proj_weight" in found and found["attn.k_proj_weight"].shape[1] == EMBED:
        lay_out(found, "attn.", True, ())
    return found


def close_gradients(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        close(mine[name], gradient, f"{what}: gradient of {name}")


def same(what: str, make: Callable[[], nn.Module], plan: Any, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """Hold a module with its heads over ranks to the same on one rank: logits, all gradients, and parameters after two steps."""
    alone, split = drawn(make, dtype), parallelize_module(drawn(make, dtype), mesh, plan)
    layer = alone.attn if isinstance(alone, Layer) else None
    widths = [EMBED] if layer is None or layer.kdim == EMBED else [EMBED, layer.kdim, layer.vdim]
    inputs = [torch.randn(BATCH, SEQ, width, dtype=dtype) for width in widths]
    (expected, theirs), (found, mine) = trained(alone, inputs), trained(split, inputs)
    for x, y in zip(found, expected, strict=True):
        close(x, y, what)
    close_gradients(mine, theirs, what)
    again = make().to(dtype)
    again.load_state_dict(whole(split.state_dict()))
    for name, x in alone.state_dict().items():
        close(again.state_dict()[name], x, f"{what}: {name} after two steps")
    return split


def all_cases(mesh: DeviceMesh, ranks: int) -> None:
    """Hold every layer and bare attention to one rank: two ranks in float32, and some in bfloat16; more ranks all in both."""
    for dtype in (torch.float32, torch.bfloat16):
        chosen = HALVES if ranks == 2 and dtype == torch.bfloat16 else {**LAYERS, **BARE}.keys()
        for what, (inner, options) in LAYERS.items():
            if what in chosen:
                same(f"layer, {what}", lambda i=inner, o=options: Layer(i, **o), {"attn": HeadParallel()}, mesh, dtype)
            assert inner.pattern.head_shard is None, "other layers may have it"
        for what, (pattern, kv_heads, options) in BARE.items():
            if what in chosen:
                make = lambda p=pattern, k=kv_heads, o=options: Bare(DilatedAttention(p), k, o)  # noqa: E731
                split = same(f"bare, {what}", make, PLAN, mesh, dtype)
                assert (split.inner.pattern.head_shard is None) == (what == "alike")
