"""Prints where Triton's compiler takes the elements of the factors and the sum of `mma.sync` to lie, as JSON, or why it cannot.

    python tests/helpers/gluon_layouts.py 16

A list for the left factor, (16, k), the right one, (k, 8), and the sum, (16, 8): for each lane, row and column of each element.
A process of its own, since Triton reports objects that are left over when a process ends that has asked for layouts.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

LANES = 32

Places = list[list[tuple[int, int]]]


def main(k: int) -> None:
    try:
        answer: list[Places] | str = fragments(k)
    except ImportError as error:
        answer = f"Triton is not installed, or has no Gluon: {error}"
    except AttributeError as error:
        answer = f"this Triton does not say its layouts: {error}"
    print(json.dumps(answer), flush=True)
    os._exit(0)  # without that report


def fragments(k: int) -> list[Places]:
    """Of the two factors and the sum."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon.language import DotOperandLayout, NVMMADistributedLayout

    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)

    def places(layout: Any, shape: list[int], count: int) -> Places:
        linear = builder.to_linear_layout(layout._to_ir(builder), shape)
        return [[place(linear, lane, i) for i in range(count)] for lane in range(LANES)]

    sums = NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    left, right = (DotOperandLayout(operand_index=i, parent=sums, k_width=2) for i in (0, 1))
    return [places(left, [16, k], k // 2), places(right, [k, 8], k // 4), places(sums, [16, 8], 4)]


def place(linear: Any, lane: int, register: int) -> tuple[int, int]:
    """The sum without carries of the bases whose bits are set."""
    row = column = 0
    for bits, bases in ((lane, linear.lane_bases), (register, linear.reg_bases)):
        for i, (rows, columns) in enumerate(bases):
            if bits >> i & 1:
                row, column = row ^ rows, column ^ columns
    return row, column


if __name__ == "__main__":
    main(int(sys.argv[1]))
