"""Mutations that nothing notices, each with the reason why it is no fault, or why no fault of its kind can be seen."""

from __future__ import annotations

OWN_ROWS = (
    "Of rows that the tile lacks, where the first row of the head comes in the place of zeros: a row of a product depends on no "
    "other row of the left factor, and those that are not below tile.rows are not written, be they NaN."
)
OWN_COLUMNS = (
    "Of columns of own rows beyond head_dim, of which the trials have none. Where there are, those of the other rows are 0, so "
    "that zeros here matter for an infinite number alone."
)
ONE_WAIT = (
    "Of the first of two tensors whose copies follow each other: the commit of the second takes them in, and wherever the kernel "
    "waits, it waits for both."
)
FOR_REGISTERS = (
    "It orders no memory: what lanes leave for each other there lies between barriers of the block. Across it the compiler moves "
    "no loads, for which there would be no registers, as the source says."
)

NO_STRIP = "Of the record of a strip, where the loop has none: its turns, none, do not use it."
NO_ROW = "Of rows that the tile lacks: the first row comes in their place, and nothing is stored of them."
NOT_IN_STRIP = "Of the biases of columns that a strip lacks: -inf comes in the place of what is copied."
FLOOR = "It makes a quotient that of Python: remainder and divisor, of which this is the exclusive union, are never equal."
LOGARITHM = "Of a logarithm: the operand that is lost is 0 but for subnormal numbers, and this is of a count."
ALL_GROUPS = "The kernel waits for all groups wherever it waits, so that two are as good as one."

SURVIVORS: dict[str, str] = {
    "mma_forward: copy of nothing 0/2": OWN_ROWS,
    "mma_dkeyvalue: copy of nothing 0/2": OWN_ROWS,
    "mma_dkeyvalue: commit 0/2": ONE_WAIT,
    "mma_dkeyvalue: barrier of a warp 1/2": FOR_REGISTERS,
    "mma_dquery: copy of nothing 0/2": OWN_ROWS,
    "mma_dquery: commit 0/2": ONE_WAIT,
    "mma_dquery_pairs: copy of nothing 0/2": OWN_ROWS,
    "mma_dquery_pairs: commit 0/2": ONE_WAIT,
    "mma_dquery_pairs: barrier of a warp 1/2": FOR_REGISTERS,
    "fp32_dquery: copy of nothing 0/2": OWN_COLUMNS,
    "fp32_dkeyvalue: copy of nothing 0/2": OWN_COLUMNS,
    "fp32_dkeyvalue: copy of nothing 1/2": OWN_COLUMNS,
    "row_dots: predicate 0/2": (
        "The compiler divides numbers below 2^32 as such, others as numbers of 64 bits: with the branch the other way round the "
        "former are divided as the latter, which gives the same. No trial has 2^32 rows, which would be divided wrongly."
    ),
    "triton forward: commit 0/1": ALL_GROUPS,
    "triton forward: copy of nothing 0/1": NO_STRIP,
    "triton forward: condition of a load 0/1": NO_ROW,
    "triton forward: default of a load 0/1": NO_STRIP,
    "triton dquery: commit 0/1": ALL_GROUPS,
    "triton dquery: copy of nothing 0/1": NOT_IN_STRIP,
    "triton dquery: condition of a load 0/1": NO_ROW,
    "triton dquery: default of a load 0/1": NO_STRIP,
    "triton dkeyvalue: barrier 0/1": (
        "It ends the pass of a query head. What the last turn reads lies before a barrier of that turn, what the next head reads "
        "behind one of its own."
    ),
    "triton dkeyvalue: commit 0/1": ALL_GROUPS,
    "triton dkeyvalue: copy of nothing 0/1": NOT_IN_STRIP,
    "triton dkeyvalue: condition of a load 0/1": NO_ROW,
    "triton dkeyvalue: default of a load 0/1": NO_STRIP,
    "numba_cuda forward: comparison 0/1": FLOOR,
    "numba_cuda forward: product 0/1": LOGARITHM,
    "numba_cuda dquery: comparison 0/1": FLOOR,
    "numba_cuda dquery: product 0/1": LOGARITHM,
    "numba_cuda dkeyvalue: comparison 0/1": FLOOR,
    "numba_cuda dkeyvalue: product 0/1": LOGARITHM,
}
