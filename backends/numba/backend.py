"""Kernels in numba.cuda: the readable GPU implementation, for whoever wants to change one.

The kernels are Python functions in `kernels`; a group of a tile schedule is one launch, with a block for each tile. Tensors are
handed over without a copy, and kernels run on torch's current stream. Arithmetic is fp32.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Protocol

from dilkit.backend import Backend, Limits, Refusal
from dilkit.backends.numba.call import Group, Options, Sizes, Tiling, View, mask_of, view
from dilkit.backends.numba.tilings import MAX_HEAD_DIM, tiling_for
from dilkit.backends.tiles.device import KEYS, QUERIES, tables
from dilkit.backends.tiles.schedule import MAX_BRANCHES, MAX_SEQ, TILE
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_BLOCKS = 2**31 - 1
"""Blocks of a launch."""

Given = tuple["Tensor", "Tensor", "Tensor", "Tensor | None"]
"""Query, key and value, and the key padding mask."""


class Launcher(Protocol):
    """Who runs the kernels of `numba_kernels`."""

    def tiling(self, role: str, head_dim: int) -> Tiling:
        """How the kernel of a role cuts its work."""
        ...

    def launch(self, role: str, dtype: str, tiling: Tiling, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run so many blocks after what was launched before. `arguments` are those of `numba_call`, all on one device."""
        ...

    def capturing(self, device: torch.device) -> bool:
        """Whether work for `device` is now recorded into a CUDA graph."""
        ...


class DeviceLauncher:
    """Launches on the tensors' GPU."""

    def tiling(self, role: str, head_dim: int) -> Tiling:
        return tiling_for(role, head_dim)

    def launch(self, role: str, dtype: str, tiling: Tiling, blocks: int, arguments: tuple[Any, ...]) -> None:
        import torch
        from numba import cuda

        from dilkit.backends.numba.kernels import compiled

        device = _device(arguments)
        with cuda.gpus[device.index]:
            stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
            kernel = compiled(role, dtype, tiling, torch.cuda.get_device_capability(device))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Grid size")  # of few blocks: short sequences have no more
                configured = kernel[blocks, (tiling.across, tiling.down), stream]
            configured(*map(_as_arrays, arguments))

    def capturing(self, device: torch.device) -> bool:
        import torch

        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()


class NumbaCuda(Backend):
    """The tiles of all branches in one pass; no atomics, so results are the same from run to run.

    `launcher` runs the kernels (default: on CUDA devices).
    """

    name = "numba_cuda"
    summary = "our kernels in numba.cuda, fp32 arithmetic, written to be read: CUDA from 5.2 on"
    requires = ("torch", "numba", "numba_cuda")
    extra = "cuda"
    limits = Limits(
        devices=frozenset({"cuda"}), dtypes=frozenset({"float32", "float16"}), min_capability=(5, 2), max_head_dim=MAX_HEAD_DIM
    )
    priority = 4
    reproducible = True

    def __init__(self, launcher: Launcher | None = None) -> None:
        self.launcher = launcher or DeviceLauncher()

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        found, branches = list(super().refusals(problem)), len(problem.pattern.branches)
        if problem.seq > MAX_SEQ:
            found.append(Refusal("seq", str(problem.seq), f"at most {MAX_SEQ}"))
        if problem.pattern.overlap == "once" and branches > MAX_BRANCHES:
            found.append(Refusal("branches", str(branches), f'at most {MAX_BRANCHES} with overlap="once"'))
        return tuple(found)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        import torch

        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty((problem.batch, problem.heads, problem.seq), dtype=torch.float32, device=query.device)
        self._run("forward", problem, (query, key, value, key_padding_mask), view(out), lse)
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
        tiling = self.launcher.tiling("dots", problem.head_dim)
        blocks = -(-lse.numel() // tiling.threads)
        self._launch("dots", problem, tiling, blocks, _sizes(problem), view(dout), view(out), delta)
        given = query, key, value, key_padding_mask
        self._run("dquery", problem, given, view(dout), lse, delta, view(dq))
        self._run("dkeyvalue", problem, given, view(dout), lse, delta, view(dk), view(dv))
        return dq, dk, dv

    def _run(self, role: str, problem: Problem, given: Given, *rest: Any) -> None:
        """A launch for each group of branches. The tiles of the first have every row, so it writes; later ones add to that."""
        query, key, value, key_padding_mask = given
        tiling, kind = self.launcher.tiling(role, problem.head_dim), KEYS if role == "dkeyvalue" else QUERIES
        found = tables(problem, tiling.rows, kind, query.device, self.launcher.capturing(query.device))
        _keep_while_used(found.data)
        options = Options(int(problem.is_causal), int(problem.pattern.overlap == "once"), problem.scale)
        common = mask_of(key_padding_mask, found.data), view(query), view(key), view(value)
        for i, table in enumerate(found.groups):
            tiles = _records(found.data, table.tiles, table.tile_count)
            branches = _records(found.data, table.branches, len(table.group.branches))
            group, blocks = Group(tiles, branches, table.group.step, int(i == 0)), table.tile_count * problem.batch
            self._launch(role, problem, tiling, blocks, _sizes(problem), options, group, *common, *rest)

    def _launch(self, role: str, problem: Problem, tiling: Tiling, blocks: int, *arguments: Any) -> None:
        if blocks > MAX_BLOCKS:
            raise ValueError(f"{problem}: {blocks} blocks for {role}, at most {MAX_BLOCKS}; use a smaller batch")
        if blocks:
            self.launcher.launch(role, problem.dtype, tiling, blocks, arguments)


def _as_arrays(x: Any) -> Any:
    """`x` with its tensors, on whatever level, as numba's arrays of the same memory."""
    import torch
    from numba import cuda

    if isinstance(x, torch.Tensor):
        return cuda.as_cuda_array(x.detach(), sync=False)
    return type(x)(*map(_as_arrays, x)) if isinstance(x, tuple) else x


def _device(arguments: tuple[Any, ...]) -> torch.device:
    """Where they all are: of every kernel, some argument is a view."""
    device: torch.device = next(x for x in arguments if isinstance(x, View)).numbers.device
    return device


def _sizes(problem: Problem) -> Any:
    return Sizes(problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim)


def _records(data: Tensor, address: int, count: int) -> Tensor:
    """The tiles or branches that lie at `address` inside `data`, int32 `(count, 4)`."""
    first = (address - data.data_ptr()) // TILE.itemsize
    return data[first : first + count]


def _keep_while_used(data: Tensor) -> None:
    """The cache may drop `data` while a kernel runs; its memory is not given away before that has ended."""
    import torch

    if data.is_cuda:
        data.record_stream(torch.cuda.current_stream(data.device))
