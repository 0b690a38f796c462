"""Mutations that nothing notices, each with the reason why it is no fault, or why no fault of its kind can be seen."""

from __future__ import annotations

FIRST_TILE = (
    "The first tile of a block is never the last one: there is a counter where tiles are more than blocks. The block that takes "
    "the last number sets it back in the other copy of the code."
)
OWN_ROWS = "Of rows that the tile lacks: what is computed of them is not stored."
NO_COLUMN = "Of queries beyond the last, which have the weight 0: those of the first row come in their place, which are numbers."

ONE_WAIT = "The kernel waits for all groups wherever it waits, so that two are as good as one."
FOR_REGISTERS = (
    "It orders no memory. Across it the compiler moves no loads, for which there would be no registers, as the source says."
)

SURVIVORS: dict[str, str] = {
    "mma_forward: counter 0": FIRST_TILE,
    "mma_forward: copy of nothing 0": OWN_ROWS,
    "mma_dkeyvalue: counter 0": FIRST_TILE,
    "mma_dkeyvalue: copy of nothing 0": OWN_ROWS,
    "mma_dkeyvalue: copy of nothing 4": NO_COLUMN,
    "mma_dkeyvalue: commit 0": ONE_WAIT,
    "mma_dkeyvalue: barrier of a warp 2": FOR_REGISTERS,
    "mma_dquery: commit 0": ONE_WAIT,
    "mma_dquery: copy of nothing 0": OWN_ROWS,
    "mma_dquery_pairs: commit 0": ONE_WAIT,
    "mma_dquery_pairs: counter 0": FIRST_TILE,
    "mma_dquery_pairs: copy of nothing 0": OWN_ROWS,
    "mma_dquery_pairs: barrier of a warp 1": FOR_REGISTERS,
    "fp32_forward: counter 0": FIRST_TILE,
    "fp32_dquery: copy of nothing 0": OWN_ROWS,
    "fp32_dkeyvalue: counter 0": FIRST_TILE,
    "fp32_dkeyvalue: copy of nothing 0": OWN_ROWS,
    "fp32_dkeyvalue: copy of nothing 12": NO_COLUMN,
    "row_dots: predicate 0": "The quotient of numbers of 32 bits is computed as one of 64 bits, which is the same.",
}

NO_STRIP = "Of the record of a strip, where the loop has none: its turns, none, do not use it."
NO_ROW = "Of rows that the tile lacks: the first row comes in their place, and nothing is stored of them."
NOT_IN_STRIP = "Of the biases of columns that a strip lacks: -inf comes in the place of what is copied."

FLOOR = "It makes a quotient that of Python: remainder and divisor, of which this is the exclusive union, are never equal."
LOGARITHM = "Of a logarithm: the operand that is lost is 0 but for subnormal numbers, and this is of a count."

SURVIVORS |= {
    "triton forward: commit 0": ONE_WAIT,
    "triton forward: copy of nothing 0": NO_STRIP,
    "triton forward: condition of a load 0": NO_ROW,
    "triton forward: default of a load 0": NO_STRIP,
    "triton dquery: commit 0": ONE_WAIT,
    "triton dquery: copy of nothing 0": NOT_IN_STRIP,
    "triton dquery: condition of a load 0": NO_ROW,
    "triton dquery: default of a load 0": NO_STRIP,
    "triton dkeyvalue: barrier 0": (
        "It ends the pass of a query head. What the last turn reads lies before a barrier of that turn, what the next head reads "
        "behind one of its own."
    ),
    "triton dkeyvalue: commit 0": ONE_WAIT,
    "triton dkeyvalue: copy of nothing 0": NOT_IN_STRIP,
    "triton dkeyvalue: condition of a load 0": NO_ROW,
    "triton dkeyvalue: default of a load 0": NO_STRIP,
    "numba_cuda forward: comparison 0": FLOOR,
    "numba_cuda forward: product 0": LOGARITHM,
    "numba_cuda dquery: comparison 0": FLOOR,
    "numba_cuda dquery: product 0": LOGARITHM,
    "numba_cuda dkeyvalue: comparison 0": FLOOR,
    "numba_cuda dkeyvalue: product 0": LOGARITHM,
}
