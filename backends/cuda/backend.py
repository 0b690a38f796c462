"""CUDA kernels of our own, in the `.cu` files of `cuda/`: all branches in one launch, compiled at first use.

Blocks stay resident and take tile after tile, those with the most keys first. A tile's rows run one softmax over the keys of
all their branches, each distinct key scored once. Branches that cannot share tiles make groups: a launch each, which goes on
from what the one before left. The gradients of queries and those of keys and values have a kernel each: nothing is added by
atomics, so results are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dilkit.backend import Backend, Limits, Refusal
from dilkit.backends.cuda.call import VIEWS, make_call
from dilkit.backends.cuda.launch import CupyLauncher, Launcher
from dilkit.backends.cuda.table import HEAD_DIMS, LOW_ROWS, MOST_ROWS, OLDEST, ROLES, STORAGE, Kernel, kernel_for, reason
from dilkit.backends.tiles.device import KEYS, QUERIES, Table, Tables, tables, tall_tiles
from dilkit.backends.tiles.schedule import MAX_BRANCHES, MAX_SEQ
from dilkit.device import Capability
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_ITEMS = 2**31 - 2**20
"""Tiles times batch: a 32-bit number counts them, and every resident block counts one too many."""

VECTOR_BYTES, ROW_BYTES = 16, 2**32
"""Rows that start at multiples of it, and are as long as one, are read `VECTOR_BYTES` at a time, if each begins less than
`ROW_BYTES` after the one before."""


class CupyRaw(Backend):
    """Our CUDA kernels, launched through CuPy.

    `launcher` runs the kernels (default: on CUDA devices through CuPy), `capability` says for which devices they are chosen
    (default: the problem's).
    """

    name = "cupy_raw"
    summary = "our CUDA C++ kernels, all branches in one launch: CUDA from 5.2 on; half types on tensor cores from 7.5 on"
    requires = ("torch", "cupy")
    extra = "cuda"
    limits = Limits(devices=frozenset({"cuda"}), dtypes=frozenset(STORAGE), min_capability=OLDEST, max_head_dim=max(HEAD_DIMS))
    priority = 5
    reproducible = True

    def __init__(self, launcher: Launcher | None = None, capability: Capability | None = None) -> None:
        self.launcher = launcher or CupyLauncher()
        self.capability = capability

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        found, branches = list(super().refusals(problem)), len(problem.pattern.branches)
        if problem.seq > MAX_SEQ:
            found.append(Refusal("seq", str(problem.seq), f"at most {MAX_SEQ}"))
        if problem.pattern.overlap == "once" and branches > MAX_BRANCHES:
            found.append(Refusal("branches", str(branches), f'at most {MAX_BRANCHES} with overlap="once"'))
        return tuple(found)

    def detail(self, problem: Problem) -> str:
        roles = ROLES if problem.requires_grad else ROLES[:1]
        names = (self._kernel(role, problem).name for role in roles)
        return f"{reason(problem.dtype, self._capability(problem))}; {', '.join(names)}"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        import torch

        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty((problem.batch, problem.heads, problem.seq), dtype=torch.float32, device=query.device)
        tensors = dict(query=query, key=key, value=value, out=out, lse=lse, mask=key_padding_mask)
        self._run("forward", QUERIES, tensors, problem)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
        tensors = dict(query=query, key=key, value=value, out=out, dout=dout, lse=lse, delta=delta, mask=key_padding_mask)
        self._dots(tensors, problem)
        self._run("dquery", QUERIES, {**tensors, "dquery": dq}, problem)
        self._run("dkeyvalue", KEYS, {**tensors, "dkey": dk, "dvalue": dv}, problem)
        return dq, dk, dv

    def _run(self, role: str, kind: str, tensors: Mapping[str, Tensor | None], problem: Problem) -> None:
        """Launch the kernel of `role` over the tiles of `kind`, group after group."""
        kernel = self._suited(role, problem, tensors)
        found = self._tables(kernel, kind, tensors, problem)
        for i, table in enumerate(found.groups):
            self._launch(kernel, table, tensors, problem, first=i == 0)

    def _dots(self, tensors: Mapping[str, Tensor | None], problem: Problem) -> None:
        """Launch the kernel that takes rows as they come, so that it needs neither tiles nor branches."""
        kernel, device = self._kernel("dots", problem, _vectors(tensors)), _device(tensors)
        rows = problem.batch * problem.heads * problem.seq
        if rows:
            at_least = kernel.threads // 16  # rows that a block takes at a time
            blocks = min(-(-rows // at_least), self.launcher.resident(kernel, device))
            self.launcher.launch(kernel, blocks, make_call(problem, tensors), device)

    def _launch(self, kernel: Kernel, table: Table, tensors: Mapping[str, Tensor | None], problem: Problem, first: bool) -> None:
        import torch

        device = _device(tensors)
        items = table.tile_count * problem.batch
        if items > MOST_ITEMS:
            raise ValueError(f"{problem}: {items} tiles over the batch, at most {MOST_ITEMS}; use a smaller batch")
        if not items:
            return
        blocks = min(items, self.launcher.resident(kernel, device))
        addresses = dict(tiles=table.tiles, branches=table.branches)
        if items > blocks:
            counter = torch.zeros(1, dtype=torch.int32, device=device)
            addresses["counter"] = counter.data_ptr()
        call = make_call(problem, tensors, table.group, table.tile_count, addresses, first)
        self.launcher.launch(kernel, blocks, call, device)

    def _tables(self, kernel: Kernel, kind: str, tensors: Mapping[str, Tensor | None], problem: Problem) -> Tables:
        import torch

        device = _device(tensors)
        found = tables(problem, kernel.tile_rows, kind, device, self.launcher.capturing(device))
        if device.type == "cuda":  # the cache may drop them while the kernel runs
            found.data.record_stream(torch.cuda.current_stream(device))
        return found

    def _suited(self, role: str, problem: Problem, tensors: Mapping[str, Tensor | None]) -> Kernel:
        """The kernel of `role`: the one with tall tiles where these suit and occupy the device."""
        vector = _vectors(tensors)
        tall = self._kernel(role, problem, vector)
        if tall.tile_rows <= LOW_ROWS:
            return tall
        tiles = tall_tiles(problem, tall.tile_rows, LOW_ROWS)
        enough = tiles and tiles * problem.batch >= self.launcher.resident(tall, _device(tensors))
        return tall if enough else self._kernel(role, problem, vector, LOW_ROWS)

    def _kernel(self, role: str, problem: Problem, vector: bool = True, most_rows: int = MOST_ROWS) -> Kernel:
        return kernel_for(role, problem.dtype, problem.head_dim, self._capability(problem), vector, most_rows)

    def _capability(self, problem: Problem) -> Capability:
        capability = self.capability or problem.device.capability
        if capability is None:
            raise ValueError(f"device={problem.device}: kernels are chosen by its compute capability, which is not known")
        return capability


def _device(tensors: Mapping[str, Tensor | None]) -> torch.device:
    query = tensors["query"]
    assert query is not None
    return query.device


def _vectors(tensors: Mapping[str, Tensor | None]) -> bool:
    """Whether every row of every view begins at a multiple of `VECTOR_BYTES`, is a multiple of it long, and follows within
    `ROW_BYTES`."""
    bits = apart = 0
    for name, x in tensors.items():
        if x is not None and name in VIEWS:
            size = x.element_size()
            bits |= x.data_ptr() | x.shape[3] * size
            apart |= x.stride(1) * size
            for length, stride in zip(x.shape[:3], x.stride(), strict=False):
                if length > 1:
                    bits |= stride * size
    return bits % VECTOR_BYTES == 0 and apart < ROW_BYTES
