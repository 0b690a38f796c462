"""The attention pattern, a value: how many times each query sees each key."""

from dilkit.pattern.checks import OFFSETS, OVERLAPS, TAILS, WHOLE_SEQUENCE, PatternError
from dilkit.pattern.kinds import (
    KINDS,
    BlockLayout,
    BlockSparse,
    Branch,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    Prefix,
    RowIntervals,
    SlidingWindow,
    Strided,
    broken_kinds,
    kind_class,
    known_kinds,
    register_kind,
)
from dilkit.pattern.pattern import Pattern

__all__ = [
    "KINDS",
    "OFFSETS",
    "OVERLAPS",
    "TAILS",
    "WHOLE_SEQUENCE",
    "BlockLayout",
    "BlockSparse",
    "Branch",
    "DilatedSegment",
    "Documents",
    "GlobalTokens",
    "Intervals",
    "Neighborhood",
    "Pattern",
    "PatternError",
    "Prefix",
    "RowIntervals",
    "SlidingWindow",
    "Strided",
    "broken_kinds",
    "kind_class",
    "known_kinds",
    "register_kind",
]
