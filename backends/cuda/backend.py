"""CUDA kernels of our own, in the `.cu` files of `kernels/`: a launch for each group of branches, compiled at first use.

Blocks stay resident and compute tile after tile, those with the most keys first. A tile's rows run one online softmax over the
keys of all their branches, each distinct key scored once. Branches that cannot share tiles make groups, one launch each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.backend import Limits, Refusal
from dilkit.backends.cuda import compile as cuda_compile, scores
from dilkit.backends.cuda.arguments import NO_ADDRESSES, join, pack_options, pack_tensors, views_of
from dilkit.backends.cuda.launch import CudaLauncher, CupyLauncher
from dilkit.backends.cuda.prepared_launches import VECTOR_BYTES, LaunchFacts, role_kernel, role_launches
from dilkit.backends.cuda.table import HEAD_DIMS, OLDEST, STORAGE, CudaKernel, padded, reason
from dilkit.backends.tiles.backend import ROLES, StepBackend, Tensors, computed_as
from dilkit.backends.tiles.device import device_schedule, proof_facts
from dilkit.backends.tiles.relations import FORMS, MOST_RUNS, most_runs
from dilkit.bias.form import BIASES, VARIANTS
from dilkit.device import Capability
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.decoding.protocol import PlacedStep
    from dilkit.op.dropout import Dropout


class CupyRaw(StepBackend):
    """CUDA kernels launched through CuPy, for the capability of a problem and with tiles that suit it."""

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
        biases=frozenset(BIASES) - {*VARIANTS},
        forms=FORMS,
    )
    priority = 5

    def __init__(
        self,
        launcher: CudaLauncher | None = None,
        capability: Capability | None = None,
        tile_rows: int | None = None,
        hopper: bool = False,
    ) -> None:
        self.launcher, self.capability, self.tile_rows = launcher or CupyLauncher(), capability, tile_rows
        self.hopper = hopper

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
        capability = self._capability(problem)
        names = (role_kernel(role, problem, capability, hopper=self.hopper).name for role in roles)
        wider = computed_as(problem.head_dim, padded(problem.head_dim))
        return f"{reason(problem.dtype, capability)}{wider}; {', '.join(names)}"

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        if not isinstance(self.launcher, CupyLauncher):  # stand-ins launch nothing on a device
            return ()
        return proof_facts(problem, self.name, *cuda_compile.facts(), *(("hopper",) if self.hopper else ()))

    def launch_step(self, placed: PlacedStep) -> tuple[Tensor, Tensor]:
        from dilkit.backends.cuda import steps

        return steps.attend(placed, self._step_kernel(placed.problem), self.launcher)

    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        query, starts = tensors["query"], tensors.get("starts")
        assert query is not None
        device, (addresses, strides) = query.device, views_of(tensors)
        sequences, aligned = None if starts is None else len(starts) - 1, not [x for x in addresses if x % VECTOR_BYTES]
        facts = role, problem, device, query.shape[1], sequences, strides, aligned
        kernel, kind, launches, is_counted = role_launches(
            LaunchFacts(*facts, self.launcher, self._capability(problem), self.tile_rows, self.hopper)
        )
        packed, options = pack_tensors(addresses, strides, tensors), pack_options(problem, tensors, dropout)
        if role == "dots":
            for launch in launches:
                self.launcher.launch(kernel, launch.blocks, join(packed, NO_ADDRESSES, launch.counts, options), device)
            return
        schedule = device_schedule(problem, kernel.tile_rows, kind, device)
        schedule.keep_while_used()
        dbias = tensors.get("dbias")
        counter = self.launcher.counter(device) if is_counted and dbias is None else 0
        # Memory that a kernel reads has a name here: it is not another's before the launch.
        places = None if dropout is None or dropout.places is None else dropout.places.to(device)
        starts_at, places_at = 0 if starts is None else starts.data_ptr(), 0 if places is None else places.data_ptr()
        for launch, group in zip(launches, schedule.groups, strict=True):
            if launch.blocks:
                ends = None if starts is None else group.tile_ends(starts)
                of_group = group.tiles, group.branches, counter if launch.is_counted else 0
                where = *of_group, starts_at, 0 if ends is None else ends.data_ptr(), places_at
                parts = scores.bias_parts(kernel, problem, launch.blocks, dbias)
                if parts is not None:
                    options = pack_options(problem, {**tensors, "bias_parts": parts}, dropout)
                blocks = launch.blocks if parts is None else len(parts)
                self.launcher.launch(kernel, blocks, join(packed, where, launch.counts, options), device)
                if parts is not None:
                    scores.add_parts(dbias, parts)

    def _step_kernel(self, problem: Problem) -> CudaKernel:
        from dilkit.backends.cuda import steps

        return steps.kernel_of(problem, self._capability(problem))

    def _capability(self, problem: Problem) -> Capability:
        capability = self.capability or problem.device.capability
        if capability is None:
            raise ValueError(f"device={problem.device}: kernels are chosen by its compute capability, which is not known")
        return capability
