"""What attention over ranks is measured at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.bench.configuration import CONFIGURATIONS, Configuration
from dilkit.tools.bench.suite import Sizes

SMALL = (
    Problem(pattern=Pattern([32, 64, 256], [1, 2, 8]), seq=256, heads=8, head_dim=16, is_causal=True, dtype="bfloat16"),
    Problem(pattern=Pattern([30, 50, 211], [1, 3, 5]), seq=211, heads=4, head_dim=8, batch=2, key_padding_mask=True),
    Problem(pattern=Pattern([64, 192], [2, 4]), seq=190, heads=8, kv_heads=2, head_dim=16, is_causal=True, dtype="float64"),
)
"""Aligned and causal; odd lengths, two sequences, a mask; grouped heads."""


@dataclass(frozen=True)
class RanksSizes(Sizes):
    """Bytes of `small` problems are counted in their dtypes, and their results compared in fp32. `configurations` by name.

    `shorter`: by how much the million is divided where memory is measured: the same ratios, a sixteenth of the work. `threads`:
    of all ranks together.
    """

    small: tuple[Problem, ...] = SMALL
    configurations: Mapping[str, Configuration] = field(default_factory=lambda: CONFIGURATIONS)
    head_dim: int = 64
    shorter: int = 4
    threads: int = 4
