"""Which backends a GPU day looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dilkit import Pattern, Problem, registry
from dilkit.backend import Backend
from dilkit.backends.sdpa.one_kernel import one_kernel_backends
from dilkit.device import Device, device_named
from dilkit.tools.gpu_day.step import Context

LEFT_OUT = ("numba_cuda", "reference")
"""Compiled for minutes; slower than all others. `dilkit verify --device cuda` looks at both."""
DTYPES = ("float32", "float16", "bfloat16")
GENERATED = "flex"
"""FlexAttention: compiled anew for every problem, which takes many times as long as to compute it."""
SLOW = {GENERATED: DTYPES, "triton": ("float32",)}
"""By dtype, what is verified and not timed: on an H200, exact products of fp32 took Triton about ten times as long as others."""


def problem(device: Device, **fields: object) -> Problem:
    """A small problem with three branches, which every backend can compute."""
    facts: dict[str, object] = dict(seq=2048, heads=8, head_dim=64, device=device)
    return Problem(pattern=Pattern([256, 1024, 2048], [1, 4, 16]), **{**facts, **fields})  # type: ignore[arg-type]


def able(context: Context) -> list[str]:
    """The backends that compute on the device, but for those left out."""
    asked = [problem(device_named(context.device), dtype=dtype) for dtype in DTYPES]
    known = {name: one for name, one in registry.backends().items() if isinstance(one, Backend) and name not in LEFT_OUT}
    return [name for name, one in known.items() if any(not one.refusals(p) for p in asked)]


def timed(context: Context, dtype: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that are right in `dtype`, and not known to be slow."""
    return [name for name in names if context.right(name, dtype) and dtype not in SLOW.get(name, ())]


def ours(context: Context) -> list[str]:
    """Those with kernels of our own, which need a proof on a GPU; in a rehearsal the CPU's."""
    asked = problem(device_named(context.device))
    known = registry.backends()
    return [name for name in able(context) if name == "native" or _proven(known[name], asked)]


def _proven(backend: object, asked: Problem) -> bool:
    """Whether the kernels of a backend need a proof. It may be another package's."""
    try:
        return isinstance(backend, Backend) and bool(backend.proof_facts(asked))
    except Exception:
        return False


@contextmanager
def every_one(context: Context) -> Iterator[dict[str, tuple[str, ...]]]:
    """Within the block each of torch's kernels is a backend of its own: names of "ours", of "torch" and of those "generated"."""
    mine = tuple(ours(context))
    with one_kernel_backends(context.kind) as kernels:
        known = dict.fromkeys((*able(context), *kernels))  # each once: those that are able are registered now
        generated = tuple(name for name in known if name == GENERATED)
        yield dict(ours=mine, generated=generated, torch=tuple(name for name in known if name not in (*mine, *generated)))
