"""Kernels in Triton, the ones to read and change: a launch for each group of branches, halves on tensor cores.

The kernels are in `forward` and `backward`, what they share in `tiles`. A launch has a program for each tile of the group and
element of the batch. Which positions a tile sees, and how often each counts, is worked out in `tables`.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dilkit import environment
from dilkit.backend import Limits, Refusal
from dilkit.backends.tiles.backend import StepBackend, Tensors, computed_as
from dilkit.backends.tiles.device import KEYS, QUERIES, proof_facts, sources_of, tall_tiles
from dilkit.backends.tiles.relations import FORMS
from dilkit.backends.tiles.schedule import LOW_ROWS
from dilkit.backends.triton.biases import add_sums, bias_constants, bias_sums, bias_view
from dilkit.backends.triton.launch import DeviceLauncher, TritonLauncher
from dilkit.backends.triton.sizes import HEAD_DIMS, OLDEST, Sizes, padded
from dilkit.backends.triton.tables import DeviceGroup, device_tables
from dilkit.bias.form import BIASES, VARIANTS
from dilkit.device import Device
from dilkit.problem import Problem
from dilkit.selection import tuned
from dilkit.selection.tuned_file import TunedKernel

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.decoding.protocol import PlacedStep
    from dilkit.op.dropout import Dropout

MOST_PROGRAMS, MOST_THREADS_ON_HIP = 2**31 - 1, 2**32 - 1
HIP_ARCHITECTURES = ("gfx90a", "gfx942")
"""AMD's architectures that all kernels but those of steps were compiled for, with no GPU at hand."""
MOST_LEARNED = 1024
"""Weights of a head whose gradient is computed: a tile is gone over once for each of those that its pairs have."""
GIVEN = {
    "forward": ("query", "key", "value", "out", "lse"),
    "dots": ("dout", "out", "delta"),
    "dquery": ("query", "key", "value", "dout", "lse", "delta", "dquery"),
    "dkeyvalue": ("query", "key", "value", "dout", "lse", "delta", "dkey", "dvalue"),
}
"""Tensors that a kernel takes by role, in its order. Those of heads are handed over with their strides."""
TUNED_ROLES = ("forward", "dquery", "dkeyvalue")
"""Kernels whose sizes `dilkit tune` measures: those with a score tile."""


class TunedLauncher(DeviceLauncher):
    """Launches with the sizes that `dilkit tune` measured as the fastest on the device, else with those of the table."""

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        measured = None
        if not low and role in TUNED_ROLES and problem.bias is None:
            of_file = environment.choices(), tuned.generation
            measured = _measured_sizes(role, problem.dtype, problem.head_dim, problem.device, of_file)
        sizes = measured or super().sizes(role, problem, low)
        if role == "dkeyvalue" and problem.bias is not None and problem.device.platform == "hip":
            return replace(sizes, columns=min(16, sizes.columns))  # with 32 columns and head_dim 128 it spills
        return sizes


@lru_cache(maxsize=256)
def _measured_sizes(role: str, dtype: str, head_dim: int, device: Device, of_file: object) -> Sizes | None:
    """Return the fastest sizes of the file of `DILKIT_TUNED`, None if it has none. `of_file` changes with the file."""
    order = tuned.measured(device, TunedKernel(compiler(), role, dtype, head_dim))
    return Sizes(*map(int, re.findall(r"\d+", order[0][0]))) if order else None


class TritonTiles(StepBackend):
    """The tiles of all branches in one pass, in Triton. `launcher` runs the kernels (default: on CUDA devices)."""

    name = "triton"
    summary = (
        "our kernels in Triton, a launch for each group of branches, written for reading: CUDA from 8.0 on, AMD's gfx90a and "
        "gfx942; half precision on tensor cores"
    )
    requires = ("torch", "triton")
    limits = Limits(
        devices=frozenset({"cuda", "hip"}),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        min_capability=OLDEST,
        max_head_dim=max(HEAD_DIMS),
        stored=frozenset({"float32", "float16", "bfloat16", "int8"}),
        softcap=True,
        biases=frozenset(BIASES) - {*VARIANTS},
        forms=FORMS,
    )
    priority = 4

    def __init__(self, launcher: TritonLauncher | None = None) -> None:
        self.launcher = launcher or TunedLauncher()

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        form, more = problem.bias, _hip_refusals(problem) if problem.device.platform == "hip" else []
        if form is not None and form.learned and form.entries > MOST_LEARNED:
            limit = f"at most {MOST_LEARNED}"
            more.append(Refusal("learned bias", f"{form.entries} weights a head", limit, 'backend="cupy_raw"'))
        return (*super().refusals(problem), *more)

    def detail(self, problem: Problem) -> str:
        if problem.stored:
            return f"fp32 on CUDA cores; rows of {padded(problem.head_dim)} numbers"
        wider = computed_as(problem.head_dim, padded(problem.head_dim))
        cuda = "fp32 on CUDA cores" if problem.dtype == "float32" else "tensor cores"
        return f"{'matrix cores' if problem.device.platform == 'hip' else cuda}{wider}"

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        here = isinstance(self.launcher, DeviceLauncher)  # stand-ins launch nothing on a device
        if not here:
            return ()
        roles = ("stored",) if problem.stored else TUNED_ROLES
        sizes = (str(self.launcher.sizes(role, problem, low=False)) for role in roles)
        return proof_facts(problem, self.name, *_compiler_facts(), *sizes)

    def launch_step(self, placed: PlacedStep) -> tuple[Tensor, Tensor]:
        from dilkit.backends.triton import steps

        return steps.attend(placed, self.launcher)

    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        arguments = tuple(_argument(tensors[name]) for name in GIVEN[role])
        if role == "dots":
            sizes = self.launcher.sizes("dots", problem, low=True)
            programs = problem.batch * problem.heads * -(-problem.seq // sizes.rows)
            constants = dict(DIM=problem.head_dim, SIZE=padded(problem.head_dim), ROWS=sizes.rows)
            self._launch("dots", problem, sizes, programs, (*arguments, problem.seq, problem.heads), constants)
            return
        sizes, device = self._suited(role, problem), arguments[0].data.device
        kind = KEYS if role == "dkeyvalue" else QUERIES
        tables = device_tables(problem, sizes, kind, device)
        tables.keep_while_used()
        for i, group in enumerate(tables.groups):
            self._launch_group(role, arguments, tensors, group, problem, sizes, first=i == 0)

    def _launch_group(
        self, role: str, given: tuple[Any, ...], tensors: Tensors, group: DeviceGroup, problem: Problem, sizes: Sizes, first: bool
    ) -> None:
        from dilkit.backends.triton.tiles import TableView

        tables, back, ahead = group
        mask, dbias = tensors["mask"], tensors.get("dbias")
        programs = len(tables[0]) * problem.batch
        sums = None if dbias is None else bias_sums(programs, dbias)
        numbers = problem.batch, problem.seq, problem.heads, problem.heads // problem.kv_heads, back, ahead
        scales = (problem.scale * math.log2(math.e),) if role == "forward" else (problem.scale, problem.scale * math.log2(math.e))
        arguments = *given, _mask(mask, tables[0]), TableView(*tables), bias_view(tensors, problem, sums), *numbers, *scales
        bounded = min(back, ahead) < problem.seq - 1
        constants = dict(FIRST=first, BOUNDED=bounded, MASKED=mask is not None, PRECISION="ieee", SOFTCAP=problem.softcap)
        constants |= dict(DIM=problem.head_dim, SIZE=padded(problem.head_dim), ROWS=sizes.rows, COLUMNS=sizes.columns)
        constants |= bias_constants(problem) | (dict(LEARNED=sums is not None) if role == "dquery" else {})
        self._launch(role, problem, sizes, programs, arguments, constants)
        if dbias is not None and sums is not None:
            add_sums(dbias, sums, tables[0])

    def _launch(
        self, role: str, problem: Problem, sizes: Sizes, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        on_hip = problem.device.platform == "hip"
        most = MOST_THREADS_ON_HIP // (64 * sizes.warps) if on_hip else MOST_PROGRAMS
        if programs > most:
            raise ValueError(f"{problem}: {programs} programs for {role}, at most {most}; use a smaller batch")
        if programs:
            self.launcher.launch(role, sizes, programs, arguments, constants)

    def _suited(self, role: str, problem: Problem) -> Sizes:
        tall = self.launcher.sizes(role, problem, low=False)
        if tall.rows <= LOW_ROWS or tall_tiles(problem, tall.rows):
            return tall
        return self.launcher.sizes(role, problem, low=True)


def _hip_refusals(problem: Problem) -> list[Refusal]:
    """Refuse some calls on AMD's GPUs, where kernels are used after a proof: none has run them."""
    architecture, refusals = problem.device.architecture, list[Refusal]()
    if architecture not in HIP_ARCHITECTURES:
        refusals.append(Refusal("architecture", architecture, f"compiled for {', '.join(HIP_ARCHITECTURES)}"))
    if (architecture, problem.dtype) == ("gfx90a", "float16"):
        limit = "its matrix units take numbers below 6e-5 for 0, which loses small weights"
        refusals.append(Refusal("dtype", "float16", limit, "use bfloat16 or float32"))
    if problem.stored:
        limit = "the counter of a step goes by CUDA's number of its stream, which HIP does not have"
        refusals.append(Refusal("stored rows", problem.stored, limit, 'backend="reference"'))
    return refusals


@lru_cache(maxsize=1)
def _compiler_facts() -> tuple[str, ...]:
    """Return Triton's version and a digest of this folder: compiled kernels depend on both."""
    return compiler(), sources_of(__file__)


def compiler() -> str:
    """Return the name of the compiler and its version."""
    import triton

    return f"triton {triton.__version__}"


def _argument(x: Tensor | None) -> Any:
    """Return a tensor as kernels take it: one of heads with its strides, a contiguous `lse` or `delta` as it is."""
    from dilkit.backends.triton.tiles import View

    assert x is not None
    return View(x.detach(), *x.stride()[:3]) if x.dim() == 4 else x


def _mask(mask: Tensor | None, anything: Tensor) -> Tensor:
    """Return the mask as kernels take it, one byte per token; `anything` stands in where there is none."""
    import torch

    return anything.view(torch.uint8) if mask is None else mask.contiguous().view(torch.uint8)
