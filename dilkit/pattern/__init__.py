"""The attention pattern, a value: how many times each query sees each key."""

from dilkit.pattern.checks import (
    OFFSETS as OFFSETS,
    OVERLAPS as OVERLAPS,
    TAILS as TAILS,
    WHOLE_SEQUENCE as WHOLE_SEQUENCE,
    PatternError as PatternError,
)
from dilkit.pattern.kinds.bands import DilatedSegment as DilatedSegment, SlidingWindow as SlidingWindow, Strided as Strided
from dilkit.pattern.kinds.block_sparse import BlockLayout as BlockLayout, BlockSparse as BlockSparse
from dilkit.pattern.kinds.branch import Branch as Branch
from dilkit.pattern.kinds.global_tokens import GlobalTokens as GlobalTokens
from dilkit.pattern.kinds.intervals import (
    Documents as Documents,
    Intervals as Intervals,
    Prefix as Prefix,
    RowIntervals as RowIntervals,
)
from dilkit.pattern.kinds.neighborhood import Neighborhood as Neighborhood
from dilkit.pattern.kinds.registry import (
    KINDS as KINDS,
    broken_kinds as broken_kinds,
    kind_class as kind_class,
    known_kinds as known_kinds,
    register_kind as register_kind,
)
from dilkit.pattern.pattern import Pattern as Pattern
