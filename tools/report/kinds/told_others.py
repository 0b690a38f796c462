"""What the demo's result and the compiler's report say, as tables and plots."""

from __future__ import annotations

from typing import Any

from dilkit.tools.bench import kernels as kernel_report
from dilkit.tools.report.document import Axis, Document, Plot, Series, Table, plots, tables
from dilkit.tools.report.kinds.told_bench import where
from dilkit.tools.report.points import plain

Result = dict[str, Any]


def told_kernels(result: Result) -> Document:
    """The compiler's report: registers by architecture."""
    registers: dict[str, list[int]] = {}
    for row in kernel_report.rows_in(result):
        registers.setdefault(row["architecture"], []).append(row["registers"])
    most = Series("most of any kernel", tuple(plain(name, max(found)) for name, found in registers.items()))
    axes = Axis("", "number"), Axis("registers of a thread", "number", log=False)
    return Document(
        headline=(kernel_report.verdict(result), where(result)),
        tables=tables(Table.of("Registers of a thread, by architecture", kernel_report.table_rows(result))),
        plots=plots(Plot("Registers of the largest kernel", "bars", (most,), axes)),
    )
