"""torchtitan's layout over rows and heads: `torchtitan_rank.py <launcher> <rows>` on each of some processes."""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers.rank import connect, say
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

from dilkit import Pattern, SlidingWindow
from dilkit.integrations.torchtitan import ContextParallelStyle, InnerAttention

PATTERNS = (
    Pattern([8, 24], [1, 2]),
    Pattern.of(SlidingWindow(7), SlidingWindow(3, heads=(0, 2))),
    Pattern.of(SlidingWindow(5, heads=(0, 2))),
)
MASKS = None, SimpleNamespace(cu_seq_q=torch.tensor([0, 7, 40, 44], dtype=torch.int32))
TOKENS, HEADS, KV_HEADS = 44, 4, 2


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, heads, 8, generator=generator, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def results(inner: Any, tensors: list[Any], masks: Any) -> list[Tensor]:
    out = inner(*tensors, attention_masks=masks)
    out.sin().sum().backward()
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (out, *(x.grad for x in tensors))]


def by_placement(inner: InnerAttention, mesh: DeviceMesh, masks: Any, expected: list[Tensor]) -> None:
    """DTensors sharded by rows along `cp` and by heads along `tp`."""
    spread = [distribute_tensor(x.detach(), mesh, [Shard(0), Shard(1)]).requires_grad_() for x in inputs()]
    for found, whole in zip(results(inner, spread, masks), expected, strict=True):
        assert_close(found, whole)


def by_style(inner: InnerAttention, mesh: DeviceMesh, masks: Any, expected: list[Tensor]) -> None:
    """DTensors sharded by rows, handed to the module as plain tensors by `local_map`, as torchtitan does."""
    rows = [Shard(0)]
    styled = parallelize_module(inner, mesh, ContextParallelStyle())
    call = local_map(styled, out_placements=rows, in_placements=(rows,) * 3, in_grad_placements=(rows,) * 3, device_mesh=mesh)
    spread = [distribute_tensor(x.detach(), mesh, rows).requires_grad_() for x in inputs()]
    for found, whole in zip(results(call, spread, masks), expected, strict=True):
        assert_close(found, whole)


def main(launcher: str, rows: int) -> None:
    world = connect(launcher, 60.0)
    mesh = init_device_mesh("cpu", (rows, world.size // rows), mesh_dim_names=("cp", "tp"))
    for pattern, masks in product(PATTERNS, MASKS):
        expected = results(InnerAttention(pattern), inputs(), masks)
        by_placement(InnerAttention(pattern), mesh, masks, expected)
        by_style(InnerAttention(pattern), mesh["cp"], masks, expected)
    say(f"rank {world.rank} equals one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
