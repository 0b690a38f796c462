"""What the report of the CUDA compiler says."""

from __future__ import annotations

from collections.abc import Iterable

from dilkit.tools.bench.kernels.record import KernelsResult, KernelUse
from dilkit.tools.report.document import Axis, Document, Plot, Series, Table, plots, tables
from dilkit.tools.report.headline import place
from dilkit.tools.report.points import plain

COLUMNS = ("kernel", "dtype", "head_dim", "tile", "threads", "blocks", "shared memory")
DTYPES = ("float32", "float16", "bfloat16")


def sentence(result: KernelsResult) -> str:
    """For README.md: how many kernels, and whether any keeps registers in memory."""
    return f"{_verdict(result)}."


def _verdict(result: KernelsResult) -> str:
    kernels = result.kernels()
    spilled = sum(kernel.spilled for kernel in kernels)
    verdict = f"{spilled} SPILL registers or have a stack" if spilled else "none spills a register or has a stack"
    counted = f"{len(kernels):,} CUDA kernels for {len({kernel.architecture for kernel in kernels})} architectures"
    older = f", {result.older:,} of them from sources that have changed since" if result.older else ""
    return f"{'QUICK, head_dim 64 alone: ' * result.quick}{counted}, compiled by NVRTC {result.nvrtc}{older}: {verdict}"


def document(result: KernelsResult) -> Document:
    """Registers by architecture."""
    registers: dict[str, list[int]] = {}
    for kernel in result.kernels():
        registers.setdefault(kernel.architecture, []).append(kernel.registers)
    most = Series("most of any kernel", tuple(plain(name, max(found)) for name, found in registers.items()))
    axes = Axis("", "number"), Axis("registers of a thread", "number", log=False)
    return Document(
        headline=(f"{_verdict(result)}.", place(result)),
        tables=tables(_table(result.kernels(), list(registers))),
        plots=plots(Plot("Registers of the largest kernel", "bars", (most,), axes)),
    )


def _table(kernels: list[KernelUse], architectures: list[str]) -> Table:
    """A row for each kernel, dtype, head_dim and height of tiles: the registers of plain calls on each architecture."""
    groups: dict[tuple[str, str, int, int], dict[str, KernelUse]] = {}
    for one in kernels:
        if one.form == "plain":
            groups.setdefault((one.name, one.dtype, one.head_dim, one.tile_rows), {})[one.architecture] = one
    rows = []
    for key in sorted(groups, key=lambda key: (key[0], DTYPES.index(key[1]) if key[1] in DTYPES else len(DTYPES), *key[2:])):
        found = groups[key]
        threads, blocks = _range(one.threads for one in found.values()), _range(one.blocks for one in found.values())
        shared = _range((one.shared + one.dynamic for one in found.values()), unit=1024)
        registers = (str(found[name].registers) if name in found else "" for name in architectures)
        rows.append((*map(str, key), threads, blocks, f"{shared} KiB", *registers))
    return Table("Registers of a thread in plain calls, by architecture", (*COLUMNS, *architectures), tuple(rows))


def _range(values: Iterable[int], unit: int = 1) -> str:
    texts = sorted({f"{value / unit:.3g}" for value in values}, key=float)
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
