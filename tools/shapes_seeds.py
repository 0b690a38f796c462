"""The shape of the result of the seeds suite: its lists. What is missing from their entries is not told."""

from __future__ import annotations

from dilkit.tools.schema import fields, listed, matching
from dilkit.tools.shapes import result
from dilkit.tools.shapes_suites import FIGURES, RUN

_STEPS = listed(fields({}))
_LISTS = dict.fromkeys(("cases", "cache", "ranks", "growth", "longest"), _STEPS)
SUITE_SEEDS = result(RUN | dict(suite=matching("seeds", '"seeds"'), figures=FIGURES) | _LISTS)
