"""Compilations of CUDA kernels, without a GPU: those that launches and steps of decoding ask for, for every kind of GPU."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda import report as cuda_report
from dilkit.backends.cuda.steps import kernel_of
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, CudaKernel, kernel_for
from dilkit.backends.tiles.backend import ROLES
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.backends.tiles.steps import MOST_GROUP
from dilkit.device import Capability
from dilkit.pattern import Pattern
from dilkit.problem import STORED, Problem
from dilkit.tools.bench.kernels import KernelUse, Key

CAPABILITIES: tuple[Capability, ...] = (
    (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0),
)  # fmt: skip
"""One of each kind of GPU that kernels are made for."""
FORMS = "plain", "elements", "packed", "dropout", "packed-dropout"
"""For what kernels are compiled apart: rows that are not read 16 bytes at a time, packed sequences, dropout."""
INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DIGITS = 12


@dataclass(frozen=True)
class Build:
    """One compilation: kernels of one file that are compiled alike, by name."""

    names: tuple[str, ...]
    kernel: CudaKernel
    capability: Capability
    dtype: str
    head_dim: int
    form: str

    @property
    def name(self) -> str:
        """Unique among all builds, and fit for a test's id."""
        sizes = str(self.head_dim), f"{self.kernel.tile_rows}rows"
        return "-".join(("-".join(self.names), self.dtype, *sizes, self.architecture, self.form))

    @property
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def keys(self) -> list[Key]:
        """Those of its rows."""
        of = self.architecture, self.dtype, self.head_dim, self.form, self.kernel.tile_rows
        return [(name, *of) for name in self.names]

    @property
    def source(self) -> str:
        """A digest of its file, of those that this includes, without comments, and of the options of the compiler."""
        options = cuda_compile.options_of(self.kernel, self.capability)
        return _sha256("\0".join((_digest_of_file(self.kernel.source), *options)))[:DIGITS]


def builds(
    capabilities: Iterable[Capability] = CAPABILITIES,
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = tuple(STORAGE),
    forms: Iterable[str] = FORMS,
) -> list[Build]:
    """Every compilation that launches ask for, but for rows that are read by the element in others than plain calls. Those for
    equal devices, dtypes and sizes are next to each other."""
    by_build: dict[Any, dict[str, CudaKernel]] = {}
    heights = MOST_ROWS, LOW_ROWS
    for capability, dtype, head_dim, form, role, rows in product(capabilities, dtypes, head_dims, forms, ROLES, heights):
        packed, dropout = "packed" in form, "dropout" in form
        if role == "dots" and (packed or dropout):
            continue  # the kernel of plain calls
        kernel = kernel_for(role, dtype, head_dim, capability, form != "elements", rows, packed, dropout)
        alike = kernel.source, tuple(kernel.macros.items()), capability, dtype, head_dim, form
        by_build.setdefault(alike, {})[kernel.name] = kernel
    return [Build(tuple(kernels), next(iter(kernels.values())), *key[2:]) for key, kernels in by_build.items()]


def step_builds(
    capabilities: Iterable[Capability] = CAPABILITIES,
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = tuple(STORAGE),
    groups: Iterable[int] = (1, 2, 4, MOST_GROUP),
) -> list[Build]:
    """Those of steps of decoding, for rows of every dtype that are stored, and groups of so many query heads."""
    asked = []
    for capability, dtype, head_dim, group in product(capabilities, dtypes, head_dims, groups):
        for stored in (dtype, *STORED[dtype]):
            sizes: dict[str, Any] = dict(seq=1, heads=group, kv_heads=1, head_dim=head_dim, is_causal=True)
            kernel = kernel_of(Problem(pattern=Pattern.dense(), dtype=dtype, stored=stored, **sizes), capability)
            asked.append(Build((kernel.name,), kernel, capability, dtype, head_dim, f"{stored}-{group}"))
    return asked


def compiled(build: Build) -> list[KernelUse]:
    """What the compiler reports of the kernels of a build."""
    kernel = build.kernel
    usages = cuda_report.usages(cuda_compile.compiled(kernel.source, cuda_compile.options_of(kernel, build.capability))[1])
    sizes: dict[str, Any] = dict(dtype=build.dtype, head_dim=build.head_dim, form=build.form)
    sizes |= dict(threads=kernel.threads, blocks=kernel.blocks, tile_rows=kernel.tile_rows, dynamic=kernel.shared_bytes)
    return [KernelUse(**asdict(usages[name]), **sizes, source=build.source) for name in build.names]


@cache
def _digest_of_file(name: str) -> str:
    text = COMMENT.sub(" ", (cuda_compile.SOURCES / name).read_text())
    included = (_digest_of_file(header) for header in INCLUDE.findall(text))
    return _sha256("\0".join((" ".join(text.split()), *included)))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
