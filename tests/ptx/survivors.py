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
}
