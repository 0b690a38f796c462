"""The attention pattern, a value: which query sees which key, and how many times."""

from dilkit.pattern.branch import DilatedSegment
from dilkit.pattern.checks import OFFSETS, OVERLAPS, TAILS, WHOLE_SEQUENCE, PatternError
from dilkit.pattern.pattern import Pattern

__all__ = ["OFFSETS", "OVERLAPS", "TAILS", "WHOLE_SEQUENCE", "DilatedSegment", "Pattern", "PatternError"]
