"""CUDA kernels of our own, in the `.cu` files of `kernels/`: a launch for each group of branches, compiled at first use.

Blocks stay resident and compute tile after tile, those with the most keys first. A tile's rows run one online softmax over the
keys of all their branches, each distinct key scored once. Branches that cannot share tiles make groups, one launch each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dilkit.backend import Limits, Refusal
from dilkit.backends.cuda import compile as cuda_compile, scores
from dilkit.backends.cuda.arguments import VIEWS, make_arguments
from dilkit.backends.cuda.launch import CudaLauncher, CupyLauncher
from dilkit.backends.cuda.table import HEAD_DIMS, OLDEST, STORAGE, CudaKernel, kernel_for, padded, reason
from dilkit.backends.tiles.backend import ROLES, StepBackend, Tensors, computed_as
from dilkit.backends.tiles.device import KEYS, QUERIES, ScheduleGroup, device_schedule, proof_facts, tall_tiles
from dilkit.backends.tiles.relations import FORMS, MOST_RUNS, most_runs
from dilkit.backends.tiles.schedule import LOW_ROWS, MAX_SEQ, MOST_ROWS
from dilkit.bias.form import APART, BIASES
from dilkit.device import Capability
from dilkit.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dilkit.decoding.protocol import PlacedStep
    from dilkit.op.dropout import Dropout

MOST_ITEMS = 2**31 - 2**20
"""Tiles times batch: a 32-bit number counts them, and every resident block counts one too many."""
VECTOR_BYTES, ROW_BYTES = 16, 2**32
"""Rows that start at multiples of it, and are as long as one, are read `VECTOR_BYTES` at a time, if each begins less than
`ROW_BYTES` after the one before."""


class CupyRaw(StepBackend):
    """Our CUDA kernels, launched through CuPy.

    `launcher` runs the kernels (default: on CUDA devices), `capability` says for which devices they are chosen (default: the
    problem's), `tile_rows` how many rows tiles have at most (default: as many as suit a problem).
    """

    name = "cupy_raw"
    summary = (
        "our kernels in CUDA C++, a launch for each group of branches: CUDA from 5.2 on; half precision on tensor cores from "
        "7.5 on"
    )
    requires = ("torch", "cupy")
    extra = "cuda"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=frozenset(STORAGE),
        min_capability=OLDEST,
        max_head_dim=max(HEAD_DIMS),
        varlen=True,
        stored=frozenset({*STORAGE, "int8"}),
        dropout=True,
        softcap=True,
        biases=frozenset(BIASES) - {APART},
        forms=FORMS,
    )
    priority = 5

    def __init__(
        self, launcher: CudaLauncher | None = None, capability: Capability | None = None, tile_rows: int | None = None
    ) -> None:
        self.launcher, self.capability, self.tile_rows = launcher or CupyLauncher(), capability, tile_rows

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        refusals = super().refusals(problem)
        if not problem.stored and not refusals and (runs := most_runs(problem)) > MOST_RUNS:
            hint = "fewer tokens, or some of them next to each other or equally far apart"
            return (Refusal("runs of global tokens", str(runs), f"at most {MOST_RUNS}", hint),)
        return refusals

    def detail(self, problem: Problem) -> str:
        if problem.stored:
            return f"fp32 on CUDA cores; {self._step_kernel(problem).name}"
        roles = ROLES if problem.requires_grad else ROLES[:1]
        names = (self._kernel(role, problem).name for role in roles)
        wider = computed_as(problem.head_dim, padded(problem.head_dim))
        return f"{reason(problem.dtype, self._capability(problem))}{wider}; {', '.join(names)}"

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        here = isinstance(self.launcher, CupyLauncher)  # stand-ins launch nothing on a device
        return proof_facts(problem, self.name, *cuda_compile.facts()) if here else ()

    def launch_step(self, placed: PlacedStep) -> tuple[Tensor, Tensor]:
        from dilkit.backends.cuda import steps

        return steps.attend(placed, self._step_kernel(placed.problem), self.launcher)

    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        rows = _all_rows(tensors, problem)
        if role == "dots":
            self._launch_dots(tensors, rows)
            return
        kernel = self._suited(role, problem, rows.seq, tensors)
        schedule = device_schedule(problem, kernel.tile_rows, KEYS if role == "dkeyvalue" else QUERIES, _device(tensors))
        schedule.keep_while_used()
        for i, group in enumerate(schedule.groups):
            self._launch_group(kernel, group, tensors, rows, i == 0, dropout)

    def _launch_dots(self, tensors: Tensors, problem: Problem) -> None:
        kernel, device = self._kernel("dots", problem, _vectors(tensors)), _device(tensors)
        rows = problem.batch * problem.heads * problem.seq
        if rows:
            at_least = kernel.threads // 16  # rows that a block computes at a time
            blocks = min(-(-rows // at_least), self.launcher.resident(kernel, device))
            self.launcher.launch(kernel, blocks, make_arguments(problem, tensors), device)

    def _launch_group(
        self, kernel: CudaKernel, group: ScheduleGroup, tensors: Tensors, problem: Problem, first: bool, dropout: Dropout | None
    ) -> None:
        device, starts = _device(tensors), tensors.get("starts")
        ends = None if starts is None else group.tile_ends(starts)  # here, so that its memory is not another's before the launch
        problem, items, addresses = _tiles_of(group, problem, starts, ends)
        if not items:
            return
        blocks = min(items, self.launcher.resident(kernel, device))
        parts = scores.bias_parts(kernel, problem, blocks, tensors.get("dbias"))
        if parts is not None:
            blocks = len(parts)
        elif items > blocks:
            addresses["counter"] = self.launcher.counter(device)
        places = None if dropout is None or dropout.places is None else dropout.places.to(device)
        if places is not None:
            addresses["places"] = places.data_ptr()
        inputs = {**tensors, "bias_parts": parts}
        arguments = make_arguments(problem, inputs, group.group, group.tile_count, addresses, first, dropout)
        self.launcher.launch(kernel, blocks, arguments, device)
        if parts is not None:
            scores.add_parts(tensors["dbias"], parts)

    def _suited(self, role: str, problem: Problem, rows: int, tensors: Tensors) -> CudaKernel:
        """The kernel of `role`: the one with tall tiles where these suit, and with so many `rows` occupy the device."""
        vector = _vectors(tensors)
        if self.tile_rows is not None:
            return self._kernel(role, problem, vector, self.tile_rows)
        tall = self._kernel(role, problem, vector)
        if tall.tile_rows <= LOW_ROWS:
            return tall
        tiles = tall_tiles(problem, tall.tile_rows)
        copies = problem.batch * rows / problem.seq
        enough = tiles and tiles * copies >= self.launcher.at_least_resident(tall, _device(tensors))
        return tall if enough else self._kernel(role, problem, vector, LOW_ROWS)

    def _step_kernel(self, problem: Problem) -> CudaKernel:
        from dilkit.backends.cuda import steps

        return steps.kernel_of(problem, self._capability(problem))

    def _kernel(self, role: str, problem: Problem, vector: bool = True, most_rows: int = MOST_ROWS) -> CudaKernel:
        capability, tiled = self._capability(problem), role != "dots"
        changed = scores.macros(role, problem.softcap > 0, problem.bias)
        options = vector, most_rows, problem.varlen and tiled, problem.dropout_p > 0 and tiled, changed
        return kernel_for(role, problem.dtype, problem.head_dim, capability, *options)

    def _capability(self, problem: Problem) -> Capability:
        capability = self.capability or problem.device.capability
        if capability is None:
            raise ValueError(f"device={problem.device}: kernels are chosen by its compute capability, which is not known")
        return capability


def _tiles_of(
    group: ScheduleGroup, problem: Problem, starts: Tensor | None, ends: Tensor | None
) -> tuple[Problem, int, dict[str, int]]:
    """The problem, how many tiles of `group` it has over the batch, at most, and the addresses of its tables.

    Of packed sequences, the batch becomes their number. Raises ValueError for more tiles than are counted.
    """
    items, addresses = group.tile_count * problem.batch, dict(tiles=group.tiles, branches=group.branches)
    if starts is not None and ends is not None:
        addresses |= dict(starts=starts.data_ptr(), tile_ends=ends.data_ptr())
        problem = replace(problem, batch=len(ends))
        items = min(group.tile_count * len(ends), problem.heads * problem.seq)
    if items > MOST_ITEMS:
        raise ValueError(f"{problem}: {items} tiles over the batch, at most {MOST_ITEMS}; use a smaller batch")
    return problem, items, addresses


def _device(tensors: Tensors) -> torch.device:
    query = tensors["query"]
    assert query is not None
    return query.device


def _all_rows(tensors: Tensors, problem: Problem) -> Problem:
    query = tensors["query"]
    assert query is not None
    if query.shape[1] > MAX_SEQ:
        raise ValueError(f"query has {query.shape[1]} rows; at most {MAX_SEQ} in all sequences: make several calls")
    return problem if query.shape[1] == problem.seq else replace(problem, seq=query.shape[1])


def _vectors(tensors: Tensors) -> bool:
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
