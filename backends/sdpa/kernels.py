"""torch's fused attention kernels as data: what each can do, in the order in which they are tried.

The functions that call them, and what these take and return, are in `aten`.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dilkit.backend import Limits, Refusal
from dilkit.backends.sdpa import aten
from dilkit.backends.sdpa.grids import FORMS, form_grids, queries_of
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


# Calls are views, so a whole tensor is handed over as it is, or as a copy in the layout of a kernel. torch caches cuDNN's plan of
# a backward pass by the sizes and strides of query, key and value, but the plan holds those of `out` and `dout` too: they have to
# follow from the query's (`equal_strides` of `SdpaKernel`).
VECTOR_BYTES = 16
AOTRITON = "gfx90a", "gfx942"
"""The architectures that AOTriton supports without torch's experimental switch."""


def cpu_layout(x: Tensor) -> Tensor:
    """Return `x`, or a copy if its rows share memory: torch's kernel leaves results unwritten, or refuses them."""
    return x.contiguous() if x.stride(1) < x.shape[3] else x


def cuda_layout(x: Tensor, expanded: bool = True) -> Tensor:
    """Return `x`, or a copy if its rows are not aligned for vector reads, or if it is expanded and may not be."""
    unit = _vector_bytes(x.shape, x.stride(), x.element_size(), expanded)
    if unit and x.data_ptr() % unit == 0:
        return x
    import torch

    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` would leave a contiguous part of a tensor where it is


@lru_cache(maxsize=1024)
def _vector_bytes(sizes: tuple[int, ...], strides: tuple[int, ...], size: int, expanded: bool) -> int:
    """Return the bytes that kernels read at once; 0 if rows of these strides do not begin at multiples, or share memory."""
    unit = math.gcd(VECTOR_BYTES, sizes[3] * size)
    steps = [step for count, step in zip(sizes[:3], strides, strict=False) if count > 1]
    return unit if all(step * size % unit == 0 and (step or expanded) for step in steps) else 0


@dataclass(frozen=True)
class SdpaKernel:
    """One fused kernel of torch, and what it can compute.

    `requires` names modules beyond torch, each with a hint; within the context `active` torch's operators run this kernel.
    `layout` copies a tensor whose rows do not lie as it has to have them; `equal_strides`: in the backward pass the strides of
    `out` and `dout` are those of the query.
    """

    name: str
    limits: Limits
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    requires: tuple[tuple[str, str], ...] = ()
    more_refusals: Callable[[Problem], list[Refusal]] = lambda problem: []
    active: Callable[[], AbstractContextManager[None]] = nullcontext
    layout: Callable[[Tensor], Tensor] = cuda_layout
    equal_strides: bool = False
    failures: dict[Problem, str] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Why torch could not plan a call, by the problem: in this process it is not tried again."""

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        """Return every reason why this kernel cannot compute `problem`; modules to install come last."""
        missing = [Refusal("module", name, "not installed", hint) for name, hint in self.requires if not installed(name)]
        refusals = list(self.limits.refusals(problem))
        if problem.varlen and problem.queries is None and not (problem.is_causal or self.limits.key_padding_mask):
            limit = "only with is_causal=True: the kernel takes no mask, and segments are padded"  # at their end
            refusals.append(Refusal("varlen", "yes", limit))
        if (why := self.failures.get(problem)) is not None:
            refusals.append(Refusal("execution plan", "missing", why))
        more = _hip_refusals if problem.device.platform == "hip" else self.more_refusals
        return (*refusals, *more(problem), *missing)

    def remember_failure(self, problem: Problem, error: RuntimeError) -> None:
        if len(self.failures) >= MOST_FAILURES:
            self.failures.clear()
        self.failures[problem] = str(error).partition("\n")[0]


MOST_FAILURES = 256
NO_PLAN = "No execution plans", "No valid execution plans", "No valid engine configs"


def has_no_plan(error: RuntimeError) -> bool:
    """True if cuDNN says that it has no way to compute a call, before it has computed anything."""
    return "cuDNN Frontend error" in (text := str(error)) and any(words in text for words in NO_PLAN)


@lru_cache(maxsize=64)
def installed(module: str) -> bool:
    """True if `module` is installed, found without importing it or its parents."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for part in rest:
        spec = spec and PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    return spec is not None


def _cpu_refusals(problem: Problem) -> list[Refusal]:
    """torch packs halves for AMX wherever the processor has that, but can only where it may use AVX-512 itself."""
    torch = sys.modules.get("torch")
    if problem.dtype not in _HALF or torch is None or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return []
    if not (error := _cpu_error(problem.dtype)):
        return []
    return [Refusal("dtype", problem.dtype, f"torch: {error}", "unset ATEN_CPU_CAPABILITY, or set ONEDNN_MAX_CPU_ISA=AVX2 too")]


@lru_cache(maxsize=2)
def _cpu_error(dtype: str) -> str:
    """Return the error of torch's CPU kernel for a call large enough to be packed for AMX; empty if it succeeds."""
    import torch

    x = torch.zeros(1, 1, 64, 16, dtype=getattr(torch, dtype), device="cpu")
    try:
        aten.cpu_forward(x, x, x, None, False, 1.0)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _efficient_refusals(problem: Problem) -> list[Refusal]:
    """Refuse head_dims that are no multiple of the vectors the kernel loads, and bf16 before capability 8.0."""
    capability = problem.device.capability or (0, 0)
    half, refusals = problem.dtype != "float32", []
    if problem.dtype == "bfloat16" and capability < (8, 0):
        refusals.append(Refusal("dtype", "bfloat16", "needs capability 8.0", "use float16 or float32"))
    step = 8 if half and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    if problem.head_dim % step:
        refusals.append(Refusal("head_dim", str(problem.head_dim), f"a multiple of {step} is needed"))
    return refusals


def _flash_refusals(problem: Problem) -> list[Refusal]:
    """Refuse wide heads with gradients on smaller chips: their shared memory is too small."""
    capability = problem.device.capability or (0, 0)
    small = capability in ((8, 6), (8, 9)) or capability >= (12, 0)
    if problem.requires_grad and problem.head_dim > 192 and small:
        return [Refusal("head_dim", str(problem.head_dim), "at most 192 with gradients on this GPU")]
    return []


def _hip_refusals(problem: Problem) -> list[Refusal]:
    """torch's kernels for AMD's GPUs are AOTriton's, for a few architectures, and read whole vectors."""
    refusals = []
    if problem.device.architecture not in AOTRITON:
        limit = f"torch's kernels for AMD are for {', '.join(AOTRITON)}"
        refusals.append(Refusal("architecture", problem.device.architecture, limit))
    if problem.head_dim % 8:
        refusals.append(Refusal("head_dim", str(problem.head_dim), "a multiple of 8 is needed"))
    return refusals


def _cudnn_refusals(problem: Problem) -> list[Refusal]:
    """cuDNN takes no single key, and its backward pass sums in no fixed order."""
    refusals, torch = [], sys.modules.get("torch")
    facts = problem.pattern, problem.seq, problem.heads, problem.kv_heads, problem.is_causal
    grids = form_grids(*facts, queries_of(problem))
    if any(min(grid.rows, grid.keys) == 1 for branch in grids for grid in branch):
        refusals.append(Refusal("rows", "1", "at least 2 rows are needed in every call"))
    if problem.head_dim > 128 and not (torch is not None and _cudnn_takes(problem)):
        limit = "at most 128, unless torch says that the cuDNN of this machine takes more"
        refusals.append(Refusal("head_dim", str(problem.head_dim), limit))
    if torch is not None and problem.requires_grad and torch.are_deterministic_algorithms_enabled():
        refusals.append(Refusal("determinism", "on", "not deterministic", "torch.use_deterministic_algorithms(False)"))
    return refusals


def _cudnn_takes(problem: Problem) -> bool:
    import torch

    if problem.device.assumed or not torch.cuda.is_available():
        return False
    place = dict(dtype=getattr(torch, problem.dtype), device=f"cuda:{problem.device.index}")
    rows = torch.empty(1, 8, 64, problem.head_dim, requires_grad=problem.requires_grad, **place)
    parameters = torch.backends.cuda.SDPAParams(rows, rows, rows, None, 0.0, problem.is_causal, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))


_lock = threading.RLock()


@contextmanager
def _activated(implementation: str) -> Iterator[None]:
    """Within the block, torch's flash operators run `implementation`; afterwards the earlier one is restored."""
    from torch.nn import attention

    with _lock:
        before = attention.current_flash_attention_impl()
        if before != implementation:
            attention.activate_flash_attention_impl(implementation)
        try:
            yield
        finally:
            if before is None:
                attention.restore_flash_attention_impl()
            elif before != implementation:
                attention.activate_flash_attention_impl(before)


_HALF = frozenset({"float16", "bfloat16"})
_FLASH = Limits(
    devices=frozenset({"cuda"}),
    dtypes=_HALF,
    min_capability=(8, 0),
    max_head_dim=256,
    head_dim_multiple=8,
    key_padding_mask=False,
    varlen=True,
    query_offset=True,
    forms=FORMS,
)
_ACTIVATION = "torch.nn.attention._fa3", "install torch 2.11 or newer"
"""2.10 has FlashAttention 4, but cannot restore the implementation before it."""

# cuDNN leads on Hopper and data-centre Blackwell. FlashAttention 3 and 4 come before it, where the user has installed them.
KERNELS = (
    SdpaKernel(
        "cpu-flash",
        Limits(varlen=True, query_offset=True, forms=FORMS),
        aten.cpu_forward,
        aten.cpu_backward,
        more_refusals=_cpu_refusals,
        layout=cpu_layout,
    ),
    SdpaKernel(
        "flash3",
        replace(_FLASH, min_capability=(9, 0), max_capability=(9, 0), grouped_heads=False),
        aten.flash_forward,
        aten.flash_backward,
        requires=(_ACTIVATION, ("flash_attn_interface", "install FlashAttention 3")),
        active=partial(_activated, "FA3"),
    ),
    SdpaKernel(
        "flash4",
        replace(_FLASH, min_capability=(9, 0), max_capability=(10, 9), grouped_heads=False),
        aten.flash_forward,
        aten.flash_backward,
        requires=(_ACTIVATION, ("flash_attn.cute.interface", "pip install --pre flash-attn-4")),
        more_refusals=lambda problem: (
            [Refusal("head_dim", str(problem.head_dim), "at most 128 on this GPU")]
            if problem.head_dim > 128 and problem.device.capability != (9, 0)
            else []
        ),
        active=partial(_activated, "FA4"),
    ),
    SdpaKernel(
        "cudnn",
        replace(_FLASH, min_capability=(9, 0), max_capability=(10, 9), grouped_heads=False, varlen=False),
        aten.cudnn_forward,
        aten.cudnn_backward,
        more_refusals=_cudnn_refusals,
        layout=partial(cuda_layout, expanded=False),  # cuDNN takes no stride of 0
        equal_strides=True,
    ),
    SdpaKernel(
        "flash",
        replace(_FLASH, devices=frozenset({"cuda", "hip"})),
        aten.flash_forward,
        aten.flash_backward,
        more_refusals=_flash_refusals,
    ),
    SdpaKernel(
        "memory-efficient",
        Limits(
            devices=frozenset({"cuda", "hip"}),
            dtypes=_HALF | {"float32"},
            min_capability=(5, 0),
            varlen=True,
            query_offset=True,
            forms=FORMS,
        ),
        aten.efficient_forward,
        aten.efficient_backward,
        more_refusals=_efficient_refusals,
    ),
)
"""On each kind of device, the first kernel without a refusal computes."""
