"""Writes machine/layouts.h: which lane holds what of the matrices of `mma` and `ldmatrix`, from the headers of CUTLASS.

    python tests/ptx/layouts.py CHECKOUT [--compare]

CHECKOUT is one of github.com/NVIDIA/cutlass. The traits of its instructions are layouts, which its own pycute evaluates:
(lane, value) -> coordinate, the first of the matrix's two fastest. Nothing of dilkit is read. With --compare nothing is written;
exit code 1 if the file is another.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = Path(__file__).parent / "machine/layouts.h"
SM80, SM75, LOADS = "mma_traits_sm80.hpp", "mma_traits_sm75.hpp", "copy_traits_sm75.hpp"
K16, K8, TURING = "SM80_16x8x16_F16F16F16F16_TN", "SM80_16x8x8_F16F16F16F16_TN", "SM75_16x8x8_F32F16F16F32_TN"
LANES = range(32)
Table = list[list[int]]
Layouts = dict[str, Any]

TOP = """/* Which lane holds what of matrices: made by tests/ptx/layouts.py from the traits of CUTLASS that are named.

   A row for each lane, a column for each half or float that it holds. A is (16, depth), at row + 16 column; B (depth, 8), at
   column + 8 row; C (16, 8), at row + 16 column. LOADED: of 8 rows of 8 halves, at column + 8 row; several matrices are alike. */
#ifndef DILKIT_PTX_LAYOUTS
#define DILKIT_PTX_LAYOUTS
"""


def main() -> int:
    """0 when the file is written, or compares equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--compare", action="store_true", help="write nothing; exit code 1 if the file is another")
    args = parser.parse_args()
    text = header(args.checkout)
    if args.compare:
        return int(text != HEADER.read_text())
    HEADER.write_text(text)
    return 0


def header(checkout: Path) -> str:
    """The text of machine/layouts.h."""
    sys.path.insert(0, str(checkout / "python"))
    from pycute import Layout  # type: ignore[import-not-found]

    products, turing, loads = (_traits(checkout / "include/cute/atom" / name, Layout) for name in (SM80, SM75, LOADS))
    deep, flat = products[K16], products[K8]
    _same(*(_held(flat[f"{x}Layout"], n) for x, n in (("A", 4), ("B", 2), ("C", 4))), other=turing[TURING])
    tables = {
        "A_K16": (K16, _held(deep["ALayout"], 8)),
        "B_K16": (K16, _held(deep["BLayout"], 4)),
        "A_K8": (K8, _held(flat["ALayout"], 4)),
        "B_K8": (K8, _held(flat["BLayout"], 2)),
        "C_ANY": (f"{K16}, {K8}", _held(deep["CLayout"], 4)),
        "LOADED": ("SM75_U32x1_LDSM_N", _loaded(loads["SM75_U32x1_LDSM_N"])),
        "LOADED_TRANSPOSED": ("SM75_U16x2_LDSM_T", _loaded(loads["SM75_U16x2_LDSM_T"])),
    }
    assert _held(flat["CLayout"], 4) == tables["C_ANY"][1]
    return TOP + "".join(_array(name, *table) for name, table in tables.items()) + "\n#endif\n"


def _array(name: str, struct: str, table: Table) -> str:
    rows = ["{" + ", ".join(map(str, row)) + "}" for row in table]
    lines = "".join("    " + ", ".join(rows[at : at + 2]) + ",\n" for at in range(0, 32, 2))
    return f"\n/* {struct} */\nstatic const unsigned char {name}[32][{len(table[0])}] = {{\n{lines}}};\n"


def _held(layout: Any, values: int) -> Table:
    return [[layout(lane, value) for value in range(values)] for lane in LANES]


def _loaded(traits: Layouts) -> Table:
    """By lane: for each of two halves, 8 times the lane whose address leads to it, and its place in these 16 bytes."""
    origin = {traits["SrcLayout"](lane, 16 * half): 8 * lane + half for lane in range(8) for half in range(8)}
    return [[origin[traits["DstLayout"](lane, 16 * half)] for half in range(2)] for lane in LANES]


def _same(a: Table, b: Table, c: Table, other: Layouts) -> None:
    """The instruction of Turing is that of Ampere."""
    for table, name in ((a, "ALayout"), (b, "BLayout"), (c, "CLayout")):
        assert table == _held(other[name], len(table[0]))


def _traits(path: Path, layout: Callable[[Any, Any], Any]) -> dict[str, Layouts]:
    """The layouts of every struct of a header, by name."""
    text = re.sub(r"//.*", "", path.read_text())
    pair = r"Layout\s*<\s*(Shape\s*<.*?>)\s*,\s*(Stride\s*<.*?>)\s*>"
    known = {n: layout(_tuple(a), _tuple(b)) for n, a, b in re.findall(rf"using (\w+)\s*=\s*{pair};", text, re.DOTALL)}
    found: dict[str, Layouts] = {}
    for struct, body in re.findall(r"struct (?:MMA_Traits|Copy_Traits)<(\w+)>[^{;]*\{(.*?)\n\};", text, re.DOTALL):
        own: Layouts = {}
        for name, text_of in re.findall(r"using (\w+)\s*=\s*(.*?);", body, re.DOTALL):
            if written := re.fullmatch(pair, text_of.strip(), re.DOTALL):
                own[name] = layout(_tuple(written[1]), _tuple(written[2]))
            elif (referred := text_of.strip()) in known | own:
                own[name] = (known | own)[referred]
        found[struct] = own
    return found


def _tuple(text: str) -> Any:
    """`Shape<Shape<_4, _8>, _2>` as nested tuples of Python."""
    nested = re.sub(r"(Shape|Stride)<", "(", re.sub(r"\s+", "", text)).replace(">", ",)")
    return ast.literal_eval(re.sub(r"_(\d+)", r"\1", nested))


if __name__ == "__main__":
    sys.exit(main())
