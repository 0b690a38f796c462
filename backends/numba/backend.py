"""Kernels in numba.cuda: the readable GPU implementation, for whoever wants to change one.

    call --> schedule --> groups of branches --> a launch each, a block for each tile --> kernels in `forward` and `backward`

Tensors are handed over without a copy, and kernels run on torch's current stream. Arithmetic is fp32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dilkit.backend import Limits
from dilkit.backends.ignored_keys import without_ignored
from dilkit.backends.numba.arguments import BY_ROW, RESULTS, LaunchGroup, ProblemNumbers, TensorView, Tiling, signature, view
from dilkit.backends.tiles.backend import Tensors, TiledBackend
from dilkit.backends.tiles.device import KEYS, QUERIES, device_schedule, proof_facts, sources_of
from dilkit.backends.tiles.schedule import TILE
from dilkit.device import Capability
from dilkit.pattern.lowering import Segments
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.op.dropout import Dropout

MAX_BLOCKS = 2**31 - 1

MAX_HEAD_DIM = 128

FORWARD = (
    Tiling(head_dim=16, rows=64, columns=32, down=32, across=4),
    Tiling(head_dim=32, rows=64, columns=32, down=16, across=8),
    Tiling(head_dim=64, rows=64, columns=32, down=8, across=16),
    Tiling(head_dim=96, rows=32, columns=32, down=8, across=8),
    Tiling(head_dim=128, rows=32, columns=32, down=8, across=16),
)
BACKWARD = (
    Tiling(head_dim=16, rows=64, columns=32, down=32, across=4),
    Tiling(head_dim=32, rows=64, columns=32, down=16, across=8),
    Tiling(head_dim=64, rows=32, columns=32, down=8, across=16),
    Tiling(head_dim=128, rows=32, columns=16, down=8, across=16),
)
"""Static shared memory is at most 48 KB a block, which holds fewer rows where two tensors of a tile stay in it. All sizes are
guesses until they are measured on a GPU."""

TABLE = {"forward": FORWARD, "dots": FORWARD, "dquery": BACKWARD, "dkeyvalue": BACKWARD}


class NumbaLauncher:
    """Compiles kernels and launches them on the tensors' GPU; fakes of GPUs are subclasses."""

    def tiling(self, role: str, head_dim: int) -> Tiling:
        """Return a kernel's first tiling that holds `head_dim`. Raises ValueError where none does."""
        for tiling in TABLE[role]:
            if head_dim <= tiling.head_dim:
                return tiling
        raise ValueError(f"head_dim={head_dim}: kernels are made for at most {MAX_HEAD_DIM}; use another backend")

    def launch(self, role: str, dtype: str, tiling: Tiling, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Launch so many blocks on the current stream. `arguments` are those of the role's `signature`, on one device."""
        import torch
        from numba import cuda

        device = next(x for x in arguments if isinstance(x, TensorView)).numbers.device
        with cuda.gpus[device.index]:
            stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
            kernel = compiled(role, dtype, tiling, torch.cuda.get_device_capability(device))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Grid size")  # of few blocks: short sequences have no more
                configured = kernel[blocks, (tiling.across, tiling.down), stream]
            configured(*map(_as_arrays, arguments))


class NumbaCuda(TiledBackend):
    """The tiles of all branches in one pass, by kernels in Python that `launcher` runs (default: on CUDA devices)."""

    name = "numba_cuda"
    summary = "our kernels in numba.cuda, fp32 arithmetic, written for reading: CUDA from 5.2 on"
    requires = ("torch", "numba", "numba_cuda")
    extra = "cuda"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "float16"}),
        min_capability=(5, 2),
        max_head_dim=MAX_HEAD_DIM,
        forms=frozenset({Segments.name}),
    )
    priority = 4

    def __init__(self, launcher: NumbaLauncher | None = None) -> None:
        self.launcher = launcher or NumbaLauncher()

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        on_device = type(self.launcher) is NumbaLauncher  # stand-ins launch nothing on a device
        return proof_facts(problem, self.name, *_compiler_facts()) if on_device else ()

    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        """Launch the kernel of `role`: "dots" once, for it needs no tiles, and the others for each group of branches.

        The tiles of the first group have every row, so it writes; later ones continue from that.
        """
        import torch

        tiling, mask = self.launcher.tiling(role, problem.head_dim), tensors.get("mask")
        sizes = problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim
        causal, once, masked = int(problem.is_causal), int(problem.pattern.overlap == "once"), int(mask is not None)
        numbers = ProblemNumbers(*sizes, causal, once, masked, problem.scale)
        present = {name: x for name, x in tensors.items() if x is not None}
        results = [present[name] if name in BY_ROW else view(present[name]) for name in RESULTS[role]]
        if role == "dots":
            self._launch(role, problem, tiling, -(-present["delta"].numel() // tiling.threads), numbers, *results)
            return
        kind = KEYS if role == "dkeyvalue" else QUERIES
        schedule = device_schedule(problem, tiling.rows, kind, present["query"].device)
        schedule.keep_while_used()
        mask_bytes = (schedule.data if mask is None else mask).view(torch.uint8)  # without a mask, never read
        inputs = present["query"], *(without_ignored(present[name], mask) for name in ("key", "value"))
        views = [view(x) for x in (mask_bytes[:, :, None, None], *inputs)]
        for i, part in enumerate(schedule.groups):
            tiles = _records(schedule.data, part.tiles, part.tile_count)
            branches = _records(schedule.data, part.branches, len(part.group.branches))
            group = LaunchGroup(tiles, branches, int(i == 0))
            self._launch(role, problem, tiling, part.tile_count * problem.batch, numbers, group, *views, *results)

    def _launch(self, role: str, problem: Problem, tiling: Tiling, blocks: int, *arguments: Any) -> None:
        if blocks > MAX_BLOCKS:
            raise ValueError(f"{problem}: {blocks} blocks for {role}, at most {MAX_BLOCKS}; use a smaller batch")
        if blocks:
            self.launcher.launch(role, problem.dtype, tiling, blocks, arguments)


def kernels() -> dict[str, Callable[[Tiling], Callable[..., None]]]:
    from dilkit.backends.numba.backward import dkeyvalue, dots, dquery
    from dilkit.backends.numba.forward import forward

    return {"forward": forward, "dots": dots, "dquery": dquery, "dkeyvalue": dkeyvalue}


@lru_cache(maxsize=256)
def compiled(role: str, dtype: str, tiling: Tiling, capability: Capability | None) -> Any:
    """Return the kernel compiled for the current device, of `capability`; the simulator has none and compiles nothing."""
    from numba import cuda

    from dilkit.backends.numba.compiling import KERNEL_OPTIONS

    return cuda.jit(signature(role, dtype), **KERNEL_OPTIONS)(kernels()[role](tiling))


@lru_cache(maxsize=1)
def _compiler_facts() -> tuple[str, ...]:
    """Return numba's versions and a digest of this folder: compiled kernels depend on both."""
    import numba

    return f"numba {numba.__version__}", f"numba-cuda {version('numba-cuda')}", sources_of(__file__)


def _as_arrays(x: Any) -> Any:
    """Return `x` with its tensors, on whatever level, as numba's arrays of the same memory."""
    import torch
    from numba import cuda

    if isinstance(x, torch.Tensor):
        return cuda.as_cuda_array(x.detach(), sync=False)
    return type(x)(*map(_as_arrays, x)) if isinstance(x, tuple) else x


def _records(data: Tensor, address: int, count: int) -> Tensor:
    """Return the tiles or branches that lie at `address` inside `data`, int32 `(count, 4)`."""
    first = (address - data.data_ptr()) // TILE.itemsize
    return data[first : first + count]
