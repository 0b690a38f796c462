"""The results of `dilkit bench` on a problem of one's own, and of `dilkit bench --overhead`."""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.tools.results.record import Case


@dataclass(frozen=True, kw_only=True)
class BenchCase(Case):
    """Implementations at one length. `output_bytes`: the size of one tensor shaped like the output."""

    seq: int
    output_bytes: int
