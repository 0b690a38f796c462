"""Kernels in Triton, the ones to read and change: all segments in one launch, halves on tensor cores.

The kernels are in `forward` and `backward`, what they share in `tiles`. A group of a tile schedule is one launch, with a program
for each tile and element of the batch. Which positions a tile sees, and how often each counts, is worked out in `tables`.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dilkit.backend import Limits
from dilkit.backends.tiles.backend import Tensors, TiledBackend
from dilkit.backends.tiles.device import KEYS, QUERIES, proof_facts, tall_tiles
from dilkit.backends.tiles.schedule import BRANCH_KINDS, LOW_ROWS
from dilkit.backends.triton.device import DeviceGroup, device_tables
from dilkit.backends.triton.sizes import HEAD_DIMS, OLDEST, Sizes, padded, sizes_for
from dilkit.device import Capability
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.op.dropout import Dropout

MOST_PROGRAMS = 2**31 - 1
"""Of a launch."""

GIVEN = {
    "forward": ("query", "key", "value", "out", "lse"),
    "dots": ("dout", "out", "delta"),
    "dquery": ("query", "key", "value", "dout", "lse", "delta", "dquery"),
    "dkeyvalue": ("query", "key", "value", "dout", "lse", "delta", "dkey", "dvalue"),
}
"""By role, the tensors that a kernel is given, in its order. Those of heads are handed over with their strides."""


class TritonLauncher(Protocol):
    """Runs the kernels in Triton."""

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        """How the kernel of a role divides its work; `low`: with tiles that are not tall."""
        ...

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Run so many programs after what was launched before. Does not wait."""
        ...


class DeviceLauncher:
    """Launches on the tensors' GPU."""

    def __init__(self, capability: Capability | None = None) -> None:
        self.capability = capability

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        capability = self.capability or problem.device.capability or OLDEST
        return sizes_for(role, problem.dtype, problem.head_dim, capability, low)

    def launch(self, role: str, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        import torch

        with torch.cuda.device(arguments[0].data.device):
            kernel(role)[(programs,)](*arguments, **constants, **compiling(sizes))


class TritonTiles(TiledBackend):
    """The tiles of all branches in one pass, in Triton.

    `launcher` runs the kernels (default: on CUDA devices).
    """

    name = "triton"
    summary = "our kernels in Triton, all segments in one launch, written to be read: CUDA from 8.0 on, halves on tensor cores"
    requires = ("torch", "triton")
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        min_capability=OLDEST,
        max_head_dim=max(HEAD_DIMS),
        branch_kinds=BRANCH_KINDS,
    )
    priority = 4

    def __init__(self, launcher: TritonLauncher | None = None) -> None:
        self.launcher = launcher or DeviceLauncher()

    def detail(self, problem: Problem) -> str:
        own, size = problem.head_dim, padded(problem.head_dim)
        wider = f"; head_dim {own} computed as {size}: {size / own:.2f} times the multiplications" if size > own else ""
        return f"{'fp32 on CUDA cores' if problem.dtype == 'float32' else 'tensor cores'}{wider}"

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        here = isinstance(self.launcher, DeviceLauncher)  # stand-ins launch nothing on a device
        return proof_facts(problem, self.name, *_compiler_facts()) if here else ()

    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        given = tuple(_argument(tensors[name]) for name in GIVEN[role])
        if role == "dots":
            self._launch_dots(given, problem)
            return
        sizes, device = self._suited(role, problem), given[0].data.device
        kind = KEYS if role == "dkeyvalue" else QUERIES
        tables = device_tables(problem, sizes, kind, device)
        tables.keep_while_used()
        for i, group in enumerate(tables.groups):
            self._launch_group(role, given, tensors["mask"], group, problem, sizes, first=i == 0)

    def _launch_dots(self, given: tuple[Any, ...], problem: Problem) -> None:
        """Launch the kernel that needs no tables: it computes rows in the order of memory."""
        sizes = self.launcher.sizes("dots", problem, low=True)
        programs = problem.batch * problem.heads * -(-problem.seq // sizes.rows)
        constants = dict(DIM=problem.head_dim, SIZE=padded(problem.head_dim), ROWS=sizes.rows)
        self._launch("dots", problem, sizes, programs, (*given, problem.seq, problem.heads), constants)

    def _launch_group(
        self,
        role: str,
        given: tuple[Any, ...],
        mask: Tensor | None,
        group: DeviceGroup,
        problem: Problem,
        sizes: Sizes,
        first: bool,
    ) -> None:
        from dilkit.backends.triton.tiles import TableView

        tables, back, ahead = group
        numbers = problem.batch, problem.seq, problem.heads, problem.heads // problem.kv_heads, back, ahead
        scales = (problem.scale * math.log2(math.e),) if role == "forward" else (problem.scale, problem.scale * math.log2(math.e))
        arguments = *given, _mask(mask, tables[0]), TableView(*tables), *numbers, *scales
        bounded = min(back, ahead) < problem.seq - 1
        constants = dict(FIRST=first, BOUNDED=bounded, MASKED=mask is not None, PRECISION="ieee")
        constants |= dict(DIM=problem.head_dim, SIZE=padded(problem.head_dim), ROWS=sizes.rows, COLUMNS=sizes.columns)
        self._launch(role, problem, sizes, len(tables[0]) * problem.batch, arguments, constants)

    def _launch(
        self, role: str, problem: Problem, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        if programs > MOST_PROGRAMS:
            raise ValueError(f"{problem}: {programs} programs for {role}, at most {MOST_PROGRAMS}; use a smaller batch")
        if programs:
            self.launcher.launch(role, sizes, programs, arguments, constants)

    def _suited(self, role: str, problem: Problem) -> Sizes:
        """The sizes of `role`: with tall tiles where these suit."""
        tall = self.launcher.sizes(role, problem, low=False)
        if tall.rows <= LOW_ROWS or tall_tiles(problem, tall.rows):
            return tall
        return self.launcher.sizes(role, problem, low=True)


def compiling(sizes: Sizes) -> dict[str, Any]:
    """Triton's own options for a kernel of these sizes. Products and sums are fused, whatever its default."""
    return dict(num_warps=sizes.warps, num_stages=sizes.stages, enable_fp_fusion=True)


def kernel(role: str) -> Any:
    """The kernel of a role, as Triton compiles it."""
    from dilkit.backends.triton import backward, forward

    return {"forward": forward.forward, "dots": backward.dots, "dquery": backward.dquery, "dkeyvalue": backward.dkeyvalue}[role]


@lru_cache(maxsize=1)
def _compiler_facts() -> tuple[str, ...]:
    """What compiled kernels depend on beside the device: Triton, and the files of this folder."""
    import triton

    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"triton {triton.__version__}", f"sources {hashlib.sha256(sources).hexdigest()[:16]}"


def _argument(x: Tensor | None) -> Any:
    """A tensor as kernels are given it: of heads with its strides, `lse` and `delta`, which are contiguous, as they are."""
    from dilkit.backends.triton.tiles import View

    assert x is not None
    return View(x.detach(), *x.stride()[:3]) if x.dim() == 4 else x


def _mask(mask: Tensor | None, anything: Tensor) -> Any:
    """The mask as kernels are given it; where there is none, `anything` stands in for it."""
    import torch

    from dilkit.backends.triton.tiles import MaskView

    found = anything if mask is None else mask
    return MaskView(found.view(torch.uint8), *(found.stride() if mask is not None else (0, 0)))
