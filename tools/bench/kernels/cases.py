"""What the compiler makes of every CUDA kernel: registers, spills, stack and shared memory, for every kind of GPU.

    python -m dilkit.tools.bench.kernels.cases [--out docs/results/kernels.json] [--jobs N] [--quick] [--only TEXT]

Needs cupy and NVRTC, and no GPU. What is in the file is compiled again where its sources have changed since; Ctrl-C ends that,
and the file has what was done. Exit code 1 if a kernel spills, has a stack, or takes more shared memory than there is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda import report as cuda_report
from dilkit.backends.cuda.steps import kernel_of
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, CudaKernel, kernel_for
from dilkit.backends.tiles.backend import ROLES
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.backends.tiles.steps import MOST_GROUP
from dilkit.device import Capability, probe
from dilkit.pattern import Pattern
from dilkit.problem import STORED, Problem
from dilkit.threads import usable_cores
from dilkit.tools.bench.kernels.record import KernelsResult, KernelUse, Key
from dilkit.tools.bench.kernels.sources import digest
from dilkit.tools.results.file import new_result, read_result, write_result

CAPABILITIES: tuple[Capability, ...] = (
    (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0),
)  # fmt: skip
"""One of each kind of GPU that kernels are made for."""


FORMS = "plain", "elements", "packed", "dropout", "packed-dropout"
"""For what kernels are compiled apart: rows that are not read 16 bytes at a time, packed sequences, dropout."""

SHARED_KIB: dict[Capability, int] = {
    (7, 0): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}
"""Shared memory that a block may have, where that is more than the `STATIC_KIB` that a kernel may declare anywhere."""
STATIC_KIB = 48


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
        """The digest of what it is compiled from."""
        return digest(self.kernel.source, cuda_compile.options_of(self.kernel, self.capability))


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
    return [Build(tuple(own), next(iter(own.values())), *key[2:]) for key, own in by_build.items()]


def step_builds(
    capabilities: Iterable[Capability] = CAPABILITIES,
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = tuple(STORAGE),
    groups: Iterable[int] = (1, 2, 4, MOST_GROUP),
) -> list[Build]:
    """Those of steps of decoding, for rows of every dtype that are stored, and groups of so many query heads."""
    found = []
    for capability, dtype, head_dim, group in product(capabilities, dtypes, head_dims, groups):
        for stored in (dtype, *STORED[dtype]):
            sizes: dict[str, Any] = dict(seq=1, heads=group, kv_heads=1, head_dim=head_dim, is_causal=True)
            kernel = kernel_of(Problem(pattern=Pattern.dense(), dtype=dtype, stored=stored, **sizes), capability)
            found.append(Build((kernel.name,), kernel, capability, dtype, head_dim, f"{stored}-{group}"))
    return found


def compiled(build: Build) -> list[KernelUse]:
    """What the compiler reports of the kernels of a build."""
    kernel = build.kernel
    usages = cuda_report.usages(cuda_compile.compiled(kernel.source, cuda_compile.options_of(kernel, build.capability))[1])
    sizes: dict[str, Any] = dict(dtype=build.dtype, head_dim=build.head_dim, form=build.form)
    sizes |= dict(threads=kernel.threads, blocks=kernel.blocks, tile_rows=kernel.tile_rows, dynamic=kernel.shared_bytes)
    return [KernelUse(**asdict(usages[name]), **sizes, source=build.source) for name in build.names]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile every kernel for every kind of GPU, and write what the compiler says of it."""
    parser = argparse.ArgumentParser(
        prog="python -m dilkit.tools.bench.kernels.cases", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/kernels.json"), help="the file (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes (default: one a core)")
    parser.add_argument("--quick", action="store_true", help="only head_dim 64, plain calls")
    parser.add_argument("--only", default="", help="of those that have changed, the ones whose names hold this text")
    args = parser.parse_args(argv)
    asked = (
        [*builds(head_dims=[64], forms=["plain"]), *step_builds(head_dims=[64])] if args.quick else [*builds(), *step_builds()]
    )
    version = ".".join(map(str, cuda_compile.compiler_version()))
    kernels, older = _brought_up_to_date(_known(args.out, version), asked, args.only, args.jobs)
    rows = tuple(kernel.row() for kernel in kernels)
    result = new_result(KernelsResult, probe("cpu"), nvrtc=version, quick=args.quick, older=older, rows=rows)
    write_result(result, args.out)
    wrong = [complaint for kernel in kernels for complaint in complaints(kernel)]
    print("\n".join(wrong), file=sys.stderr)
    print(f"written: {args.out}, {len(kernels)} kernels, {older} of older sources, {len(wrong)} complaints")
    return 1 if wrong else 0


def _brought_up_to_date(known: dict[Key, KernelUse], asked: list[Build], only: str, jobs: int) -> tuple[list[KernelUse], int]:
    """The kernels of `asked` that are known or compiled now; how many of them are of older sources, not compiled or not yet."""
    sources = {key: build.source for build in asked for key in build.keys}
    known = {key: known[key] for key in sources if key in known}
    current = {key for key, kernel in known.items() if kernel.source == sources[key]}
    with suppress(KeyboardInterrupt):
        for kernel in _compiled([b for b in asked if only in b.name and not current.issuperset(b.keys)], jobs):
            known[kernel.key] = kernel
            current.add(kernel.key)
    return [known[key] for key in sources if key in known], len(known) - len(current)


def _known(path: Path, version: str) -> dict[Key, KernelUse]:
    """What the file says of kernels; nothing where there is none, or where it is of another compiler."""
    if not path.exists():
        return {}
    result = read_result(path, KernelsResult)
    return {kernel.key: kernel for kernel in result.kernels()} if result.nvrtc == version else {}


def complaints(kernel: KernelUse) -> list[str]:
    """What is wrong with what the compiler made of a kernel."""
    number = int(kernel.architecture.removeprefix("sm_"))
    limit = SHARED_KIB.get(divmod(number, 10), STATIC_KIB)
    sizes = [f"{size} bytes of {name}" for name, size in (("spills", kernel.spills), ("stack", kernel.stack)) if size]
    if kernel.shared > STATIC_KIB * 1024 or kernel.shared + kernel.dynamic > limit * 1024:
        sizes.append(f"{kernel.shared} + {kernel.dynamic} bytes of shared memory, at most {limit} KiB")
    return [f"{' '.join(kernel.row().split()[:5])}: {text}" for text in sizes]


def _compiled(asked: list[Build], jobs: int) -> Iterator[KernelUse]:
    with multiprocessing.get_context("spawn").Pool(jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        for done, found in enumerate(pool.imap(compiled, asked), 1):
            print(f"\r{done} of {len(asked)}", end="" if done < len(asked) else "\n", file=sys.stderr, flush=True)
            yield from found


if __name__ == "__main__":
    sys.exit(main())
