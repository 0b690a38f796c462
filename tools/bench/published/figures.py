"""The figures that documents of older implementations published, each with the setting that measures it again.

A claim names what was claimed, on what, and how the same quantity is read from a measurement of ours. What is known to be wrong
with a claim is said beside it. All were taken on one or two GTX 1080, of the forward pass alone. A figure that a document's
prose repeats appears once.
"""

from __future__ import annotations

from dataclasses import replace

from dilkit.tools.bench.published.claim import Claim, Setting, halves
from dilkit.tools.bench.published.one_device import COMPREHENSIVE, ORIGINAL, comprehensive, original
from dilkit.tools.bench.published.orders import HILBERT, HILBERT_SETTINGS, hilbert
from dilkit.tools.bench.published.over_ranks import HYBRID, RING, hybrid, ring

__all__ = ["HILBERT_SETTINGS", "claims", "held", "settings"]
DOCUMENTS = (HYBRID, RING, COMPREHENSIVE, ORIGINAL, HILBERT)


def claims() -> tuple[Claim, ...]:
    """All figures of the documents, in their order."""
    return tuple(claim for part in (hybrid, ring, comprehensive, original, hilbert) for claim in part())


def settings(*documents: str) -> tuple[Setting, ...]:
    """What has to be measured for the claims of these documents (default: all), the shortest first."""
    told = [claim for claim in claims() if not documents or claim.document in documents]
    found = {setting: None for claim in told for setting in (claim.setting, claim.base) if setting is not None}
    return tuple(sorted(found, key=lambda s: (s.ranks, s.tokens, s.seq, s.heads, s.segment_lengths)))


def held(setting: Setting) -> Setting:
    """`setting` with the segments of 2,048 tokens, whatever its own length: what users do."""
    return replace(setting, segment_lengths=halves(2048), dilation_rates=(1, 2))
