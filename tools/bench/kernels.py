"""What the compiler makes of every CUDA kernel: registers, spills, stack and shared memory, for every kind of GPU.

    python -m dilkit.tools.bench.kernels [--out docs/results/kernels.json] [--jobs N] [--quick]

Needs cupy and NVRTC, and no GPU. Exit code 1 if a kernel spills, has a stack, or takes more shared memory than there is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dilkit.backends.cuda import compile as cuda_compile
from dilkit.backends.cuda import report as cuda_report
from dilkit.backends.cuda.table import HEAD_DIMS, LOW_ROWS, MOST_ROWS, STORAGE, CudaKernel, kernel_for
from dilkit.backends.tiles.backend import ROLES
from dilkit.device import Capability, probe
from dilkit.tools.console.text import markdown_table
from dilkit.tools.results import untyped as results

CAPABILITIES: tuple[Capability, ...] = (
    (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0),
)  # fmt: skip
"""One of each kind of GPU that kernels are made for."""


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

FIELDS = (
    "name", "architecture", "dtype", "head_dim", "vector", "threads", "blocks", "tile_rows", "dynamic", "shared", "registers",
    "spills", "stack",
)  # fmt: skip
"""What is kept of a kernel, in the order in which it is written."""


@dataclass(frozen=True)
class Build:
    """One compilation: kernels of one file that are compiled alike, by name."""

    names: tuple[str, ...]
    kernel: CudaKernel
    capability: Capability
    dtype: str
    head_dim: int
    vector: bool

    @property
    def name(self) -> str:
        """Unique among all builds, and fit for a test's id."""
        sizes = str(self.head_dim), f"{self.kernel.tile_rows}rows"
        words = "-".join(self.names), self.dtype, *sizes, "sm_{}{}".format(*self.capability)
        return "-".join(words if self.vector else (*words, "elements"))


def builds(
    capabilities: Iterable[Capability] = CAPABILITIES,
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[str] = tuple(STORAGE),
    vectors: Iterable[bool] = (True, False),
) -> list[Build]:
    """Every compilation that launches ask for, those for equal devices, dtypes and sizes next to each other."""
    found: dict[Any, dict[str, CudaKernel]] = {}
    heights = MOST_ROWS, LOW_ROWS
    for capability, dtype, head_dim, vector, role, rows in product(capabilities, dtypes, head_dims, vectors, ROLES, heights):
        kernel = kernel_for(role, dtype, head_dim, capability, vector, rows)
        alike = kernel.source, tuple(kernel.macros.items()), capability, dtype, head_dim, vector
        found.setdefault(alike, {})[kernel.name] = kernel
    return [Build(tuple(own), next(iter(own.values())), *key[2:]) for key, own in found.items()]


def rows_of(build: Build) -> list[dict[str, Any]]:
    """What the compiler reports of the kernels of a build: `FIELDS`, those of the build and of `cuda_report.Usage`."""
    log = cuda_compile.compiled(build.kernel.source, cuda_compile.options_of(build.kernel, build.capability))[1]
    usages = cuda_report.usages(log)
    sizes = dict(dtype=build.dtype, head_dim=build.head_dim, vector=int(build.vector))
    kernel = build.kernel
    told = dict(threads=kernel.threads, blocks=kernel.blocks, tile_rows=kernel.tile_rows, dynamic=kernel.shared_bytes)
    return [{**asdict(usages[name]), **sizes, **told} for name in build.names]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile every kernel for every kind of GPU, and write what the compiler says of it."""
    parser = argparse.ArgumentParser(prog="python -m dilkit.tools.bench.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/kernels.json"), help="the file (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=results.usable_cores(), help="processes (default: one a core)")
    parser.add_argument("--quick", action="store_true", help="only head_dim 64, rows read 16 bytes at a time")
    args = parser.parse_args(argv)
    rows = list(_compiled(builds(head_dims=[64], vectors=[True]) if args.quick else builds(), args.jobs))
    version = ".".join(map(str, cuda_compile.compiler_version()))
    lines = [" ".join(str(row[name]) for name in FIELDS) for row in rows]
    results.save(results.new("kernels", probe("cpu"), nvrtc=version, quick=args.quick, fields=FIELDS, rows=lines), args.out)
    wrong = [complaint for row in rows for complaint in complaints(row)]
    print("\n".join(wrong), file=sys.stderr)
    print(f"written: {args.out}, {len(rows)} kernels, {len(wrong)} complaints")
    return 1 if wrong else 0


def complaints(row: dict[str, Any]) -> list[str]:
    """What is wrong with what the compiler made of a kernel."""
    number = int(row["architecture"].removeprefix("sm_"))
    limit = SHARED_KIB.get(divmod(number, 10), STATIC_KIB)
    found = [f"{row[name]} bytes of {name}" for name in ("spills", "stack") if row[name]]
    if row["shared"] > STATIC_KIB * 1024 or row["shared"] + row["dynamic"] > limit * 1024:
        found.append(f"{row['shared']} + {row['dynamic']} bytes of shared memory, at most {limit} KiB")
    return [f"{' '.join(str(row[name]) for name in FIELDS[:5])}: {text}" for text in found]


def _compiled(asked: list[Build], jobs: int) -> Iterator[dict[str, Any]]:
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for done, rows in enumerate(pool.imap(rows_of, asked), 1):
            print(f"\r{done} of {len(asked)}", end="" if done < len(asked) else "\n", file=sys.stderr, flush=True)
            yield from rows


def rows_in(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result as `rows_of` made them."""
    rows = (dict(zip(result["fields"], line.split(), strict=True)) for line in result["rows"])
    return [{name: int(value) if value.isdigit() else value for name, value in row.items()} for row in rows]


def verdict(result: dict[str, Any]) -> str:
    """A result in one sentence."""
    found = rows_in(result)
    wrong = sum(bool(row["spills"] or row["stack"]) for row in found)
    told = f"{wrong} SPILL registers or have a stack" if wrong else "none spills a register or has a stack"
    architectures = {row["architecture"] for row in found}
    quick = "QUICK, head_dim 64 alone: " if result["quick"] else ""
    counted = f"{len(found)} times for {len(architectures)} architectures"
    return f"{quick}CUDA kernels compiled by NVRTC {result['nvrtc']}, {counted}: {told}."


def markdown(result: dict[str, Any]) -> str:
    """The verdict and the table of a result."""
    return f"{verdict(result)} Registers of a thread, by architecture:\n\n" + "\n".join(markdown_table(table_rows(result)))


def table_rows(result: dict[str, Any]) -> list[list[str]]:
    """The column names, then a row for each kernel, dtype, head_dim and height of tiles: the registers on each architecture."""
    found = rows_in(result)
    architectures = list(dict.fromkeys(row["architecture"] for row in found))
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found:
        if row["vector"]:
            groups.setdefault((row["name"], row["dtype"], row["head_dim"], row["tile_rows"]), {})[row["architecture"]] = row
    order = sorted(groups, key=lambda key: (key[0], list(STORAGE).index(key[1]), *key[2:]))
    head = ["kernel", "dtype", "head_dim", "tile", "threads", "blocks", "shared memory", *architectures]
    return [head, *(_line(key, groups[key], architectures) for key in order)]


def _line(key: tuple[Any, ...], rows: dict[str, dict[str, Any]], architectures: list[str]) -> list[str]:
    threads, blocks = (_range(row[name] for row in rows.values()) for name in ("threads", "blocks"))
    shared = _range((row["shared"] + row["dynamic"] for row in rows.values()), unit=1024)
    registers = (str(rows[name]["registers"]) if name in rows else "" for name in architectures)
    return [f"`{key[0]}`", key[1], str(key[2]), str(key[3]), threads, blocks, f"{shared} KiB", *registers]


def _range(values: Iterable[int], unit: int = 1) -> str:
    found = sorted({f"{value / unit:.3g}" for value in values}, key=float)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


if __name__ == "__main__":
    sys.exit(main())
