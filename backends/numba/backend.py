"""Kernels in numba.cuda: the readable GPU implementation, for whoever wants to change one.

The kernels are Python functions in `forward` and `backward`; a group of a tile schedule is one launch, with a block for each
tile. Tensors are handed over without a copy, and kernels run on torch's current stream. Arithmetic is fp32.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dilkit.backend import Limits
from dilkit.backends.ignored_keys import without_ignored
from dilkit.backends.numba.arguments import LaunchGroup, Options, ProblemSizes, TensorView, Tiling, mask_view, view
from dilkit.backends.tiles.backend import Tensors, TiledBackend
from dilkit.backends.tiles.device import KEYS, QUERIES, device_schedule, proof_facts
from dilkit.backends.tiles.schedule import TILE
from dilkit.pattern.lowering import Segments
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dilkit.op.dropout import Dropout

MAX_BLOCKS = 2**31 - 1
"""Blocks of a launch."""


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


def tiling_for(role: str, head_dim: int) -> Tiling:
    """The first tiling that holds `head_dim`. Raises ValueError where none does."""
    for tiling in TABLE[role]:
        if head_dim <= tiling.head_dim:
            return tiling
    raise ValueError(f"head_dim={head_dim}: kernels are made for at most {MAX_HEAD_DIM}; use another backend")


class NumbaLauncher(Protocol):
    """Runs the kernels in numba.cuda."""

    def tiling(self, role: str, head_dim: int) -> Tiling:
        """Return the tiling of the kernel of a role."""
        ...

    def launch(self, role: str, dtype: str, tiling: Tiling, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run so many blocks after what was launched before. `arguments` are those of its `signature`, on one device."""
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


class NumbaCuda(TiledBackend):
    """The tiles of all branches in one pass, in Python.

    `launcher` runs the kernels (default: on CUDA devices).
    """

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
        self.launcher = launcher or DeviceLauncher()

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        here = isinstance(self.launcher, DeviceLauncher)  # stand-ins launch nothing on a device
        return proof_facts(problem, self.name, *_compiler_facts()) if here else ()

    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        if role == "dots":
            self._launch_dots(_present(tensors), problem)
        else:
            self._launch_groups(role, _present(tensors), tensors["mask"], problem)

    def _launch_dots(self, tensors: dict[str, Tensor], problem: Problem) -> None:
        """Launch the kernel that needs neither tiles nor branches."""
        tiling = self.launcher.tiling("dots", problem.head_dim)
        blocks = -(-tensors["delta"].numel() // tiling.threads)
        self._launch("dots", problem, tiling, blocks, *_results("dots", tensors))

    def _launch_groups(self, role: str, tensors: dict[str, Tensor], mask: Tensor | None, problem: Problem) -> None:
        """Launch a kernel for each group of branches. The tiles of the first have every row, so it writes; later ones continue
        from that."""
        tiling, device = self.launcher.tiling(role, problem.head_dim), tensors["query"].device
        schedule = device_schedule(problem, tiling.rows, KEYS if role == "dkeyvalue" else QUERIES, device)
        schedule.keep_while_used()
        options = Options(int(problem.is_causal), int(problem.pattern.overlap == "once"), problem.scale)
        key, value = (without_ignored(tensors[name], mask) for name in ("key", "value"))
        views = mask_view(mask, schedule.data), *(view(x) for x in (tensors["query"], key, value))
        for i, part in enumerate(schedule.groups):
            tiles = _records(schedule.data, part.tiles, part.tile_count)
            branches = _records(schedule.data, part.branches, len(part.group.branches))
            group, blocks = LaunchGroup(tiles, branches, int(i == 0)), part.tile_count * problem.batch
            self._launch(role, problem, tiling, blocks, options, group, *views, *_results(role, tensors))

    def _launch(self, role: str, problem: Problem, tiling: Tiling, blocks: int, *arguments: Any) -> None:
        if blocks > MAX_BLOCKS:
            raise ValueError(f"{problem}: {blocks} blocks for {role}, at most {MAX_BLOCKS}; use a smaller batch")
        if blocks:
            sizes = ProblemSizes(problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim)
            self.launcher.launch(role, problem.dtype, tiling, blocks, (sizes, *arguments))


@lru_cache(maxsize=1)
def _compiler_facts() -> tuple[str, ...]:
    """Return numba's versions and a digest of this folder: compiled kernels depend on both."""
    import numba

    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    versions = f"numba {numba.__version__}", f"numba-cuda {version('numba-cuda')}"
    return (*versions, f"sources {hashlib.sha256(sources).hexdigest()[:16]}")


RESULTS = {
    "forward": ("out", "lse"),
    "dots": ("dout", "out", "delta"),
    "dquery": ("dout", "lse", "delta", "dquery"),
    "dkeyvalue": ("dout", "lse", "delta", "dkey", "dvalue"),
}
"""By role, the last tensors among a kernel's arguments."""


def _results(role: str, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """The last arguments of a kernel: `lse` and `delta` as they are, the others as views."""
    return tuple(tensors[name] if name in ("lse", "delta") else view(tensors[name]) for name in RESULTS[role])


def _present(tensors: Tensors) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


def _as_arrays(x: Any) -> Any:
    """`x` with its tensors, on whatever level, as numba's arrays of the same memory."""
    import torch
    from numba import cuda

    if isinstance(x, torch.Tensor):
        return cuda.as_cuda_array(x.detach(), sync=False)
    return type(x)(*map(_as_arrays, x)) if isinstance(x, tuple) else x


def _device(arguments: tuple[Any, ...]) -> torch.device:
    """Return the device of a kernel's arguments, of which at least one is a view."""
    return next(x for x in arguments if isinstance(x, TensorView)).numbers.device


def _records(data: Tensor, address: int, count: int) -> Tensor:
    """The tiles or branches that lie at `address` inside `data`, int32 `(count, 4)`."""
    first = (address - data.data_ptr()) // TILE.itemsize
    return data[first : first + count]
