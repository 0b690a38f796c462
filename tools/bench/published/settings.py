"""Which settings the suite measures beside those of the claims: the same lengths as users would have them, and ranks."""

from __future__ import annotations

from dataclasses import replace

from dilkit.tools.bench.published.claim import Setting
from dilkit.tools.bench.published.figures import COMPREHENSIVE, HILBERT_SETTINGS, HYBRID, ORIGINAL, RING, held, settings

LONG = tuple(1 << power for power in range(16, 22))
"""Lengths of --full: to two million tokens."""
IMPLEMENTATIONS = settings(COMPREHENSIVE)
MULTI_SEGMENT = HILBERT_SETTINGS["multi-segment"]
LENGTHS = tuple(s for s in settings(ORIGINAL) if s.batch == 1 and s.heads == 8)
HEADS = tuple(s for s in settings(ORIGINAL) if (s.seq, s.batch, s.segment_lengths) == (2048, 2, (512, 1024)))
BATCHES = tuple(s for s in settings(ORIGINAL) if (s.seq, s.heads, s.segment_lengths) == (2048, 8, (512, 1024)))
QUICK_TABLE = tuple(s for s in LENGTHS if s.seq >= 8192) + tuple(
    s for s in settings(ORIGINAL) if s.batch == 2 and s.heads == 8 and s.segment_lengths == (s.seq // 4, s.seq // 2)
)
CONFIGURATIONS = tuple(s for s in settings(ORIGINAL) if s.seq == 4096 and s.batch == 2)


def held_lengths(full: bool) -> tuple[Setting, ...]:
    """The lengths of the published scaling, and longer ones, in fp32 with segments that stay as they are."""
    lengths = [replace(s, dtype="float32") for s in LENGTHS if s.seq > 1024]
    longer = [replace(lengths[-1], seq=seq) for seq in (32768, *(LONG if full else ()))]
    return tuple(held(setting) for setting in (*lengths, *longer))


def alone(full: bool) -> tuple[Setting, ...]:
    """All that one device measures, the shortest first."""
    found = [s for s in settings() if s.ranks == 1] + list(held_lengths(full))
    return tuple(sorted(dict.fromkeys(found), key=lambda s: (s.tokens * max(s.segment_lengths), s.seq, s.heads)))


def over_ranks(sizes: tuple[int, ...]) -> tuple[Setting, ...]:
    """The settings of ranks, each with these numbers of them: the same sequence for all."""
    documents = dict.fromkeys(replace(s, ranks=1) for s in settings(HYBRID, RING))
    return tuple(replace(s, ranks=ranks) for s in sorted(documents, key=lambda s: s.tokens) for ranks in sizes)


def growing(sizes: tuple[int, ...], full: bool) -> tuple[Setting, ...]:
    """A sequence that is as many times longer as there are ranks, with segments that stay as they are."""
    (first, *_) = settings(HYBRID)
    return tuple(replace(first, seq=(LONG[2] if full else 2048) * ranks, batch=1, ranks=ranks) for ranks in sizes)
