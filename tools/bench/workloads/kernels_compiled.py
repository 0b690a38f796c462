"""Compiles every CUDA kernel for every kind of GPU, without one, and writes docs/results/kernels.json; 1 if one spills."""

import argparse
import hashlib
import multiprocessing
import re
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dilkit.backends.cuda import compile as cuda_compile, report as cuda_report
from dilkit.backends.cuda.steps import kernel_of
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, CudaKernel, kernel_for
from dilkit.backends.tiles.backend import ROLES
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.backends.tiles.steps import MOST_GROUP
from dilkit.device import Capability, probe
from dilkit.pattern import Pattern
from dilkit.problem import STORED, Problem
from dilkit.threads import usable_cores
from dilkit.tools.bench.suites.kernels import KernelsResult, KernelUse, Key
from dilkit.tools.results.file import new_result, read_result, write_result

OUT = Path("docs/results/kernels.json")
CAPABILITIES: tuple[Capability, ...] = (
    (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0),
)  # fmt: skip
"""One of each kind of GPU that kernels are made for."""
FORMS = "plain", "elements", "packed", "dropout", "packed-dropout"
"""For what kernels are compiled apart: rows that are not read 16 bytes at a time, packed sequences, dropout."""
INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def main() -> int:
    argparse.ArgumentParser(description=f"compiles every CUDA kernel for every kind of GPU, and writes {OUT}").parse_args()
    wanted = [*builds(), *step_builds()]
    version = ".".join(map(str, cuda_compile.compiler_version()))
    before = read_result(OUT, KernelsResult) if OUT.exists() else None
    known = {kernel.key: kernel for kernel in before.kernels()} if before and before.nvrtc == version else {}
    sources = {key: build.source for build in wanted for key in build.keys}
    current = {key for key, kernel in known.items() if kernel.source == sources.get(key)}
    changed = [build for build in wanted if not current.issuperset(build.keys)]
    ignored = signal.SIGINT, signal.SIG_IGN
    with (
        suppress(KeyboardInterrupt),
        multiprocessing.get_context("spawn").Pool(usable_cores(), signal.signal, ignored) as pool,
    ):
        for uses in tqdm(pool.imap(compiled, changed), total=len(changed), unit="build"):
            known |= {kernel.key: kernel for kernel in uses}
            current.update(kernel.key for kernel in uses)
    kernels = [known[key] for key in sources if key in known]
    facts = dict(nvrtc=version, older=len(kernels) - len(current), rows=tuple(kernel.row() for kernel in kernels))
    write_result(new_result(KernelsResult, probe("cpu"), **facts), OUT)
    wrong = [complaint for kernel in kernels for complaint in kernel.complaints]
    print(*wrong, sep="\n", file=sys.stderr)
    print(f"written: {OUT}, {len(kernels)} kernels, {facts['older']} of older sources, {len(wrong)} complaints")
    return int(bool(wrong))


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
    def architecture(self) -> str:
        return "sm_{}{}".format(*self.capability)

    @property
    def keys(self) -> list[Key]:
        facts = self.architecture, self.dtype, self.head_dim, self.form, self.kernel.tile_rows
        return [(name, *facts) for name in self.names]

    @property
    def source(self) -> str:
        """A digest of its file and of those that this includes, without comments, and of the options of the compiler."""
        options = cuda_compile.options_of(self.kernel, self.capability)
        return _sha256(_digest_of_file(self.kernel.source), *options)[:12]


def builds(
    capabilities: Iterable[Capability] = CAPABILITIES,
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = tuple(STORAGE),
    forms: Iterable[str] = FORMS,
) -> list[Build]:
    """Return every compilation that launches ask for; rows are read by the element in plain calls alone."""
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
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = tuple(STORAGE),
    groups: Iterable[int] = (1, 2, 4, MOST_GROUP),
) -> list[Build]:
    """Return the compilations of steps of decoding, for stored rows of every dtype, and groups of so many query heads."""
    step_kernels = []
    for capability, dtype, head_dim, group in product(CAPABILITIES, dtypes, head_dims, groups):
        for stored in (dtype, *STORED[dtype]):
            sizes: dict[str, Any] = dict(seq=1, heads=group, kv_heads=1, head_dim=head_dim, is_causal=True)
            kernel = kernel_of(Problem(pattern=Pattern.dense(), dtype=dtype, stored=stored, **sizes), capability)
            step_kernels.append(Build((kernel.name,), kernel, capability, dtype, head_dim, f"{stored}-{group}"))
    return step_kernels


def compiled(build: Build) -> list[KernelUse]:
    """Compile a build, and return what the compiler reports of its kernels."""
    kernel = build.kernel
    usages = cuda_report.usages(cuda_compile.compiled(kernel.source, cuda_compile.options_of(kernel, build.capability))[1])
    sizes: dict[str, Any] = dict(dtype=build.dtype, head_dim=build.head_dim, form=build.form)
    sizes |= dict(threads=kernel.threads, blocks=kernel.blocks, tile_rows=kernel.tile_rows, dynamic=kernel.shared_bytes)
    return [KernelUse(**asdict(usages[name]), **sizes, source=build.source) for name in build.names]


@cache
def _digest_of_file(name: str) -> str:
    text = COMMENT.sub(" ", (cuda_compile.SOURCES / name).read_text())
    return _sha256(" ".join(text.split()), *(_digest_of_file(header) for header in INCLUDE.findall(text)))


def _sha256(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
