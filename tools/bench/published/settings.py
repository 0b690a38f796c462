"""Which settings the suite measures: those of the claims, the same lengths as users would have them, and numbers of ranks."""

from __future__ import annotations

from dataclasses import replace

from dilkit.tools.bench.published.claims import group, settings
from dilkit.tools.results.kinds.published import Setting

LONG = tuple(1 << power for power in range(16, 22))
"""Lengths of --full: to two million tokens."""
HELD = Setting(2048, (512, 1024), (1, 2))
"""Segments that users keep, whatever the length."""


def held_lengths(full: bool) -> tuple[Setting, ...]:
    """The lengths of the published scaling, and longer ones, in fp32 with segments that stay as they are."""
    published = [setting.seq for setting in group("lengths").values() if setting.seq > 1024]
    return tuple(replace(HELD, seq=seq) for seq in (*published, 32768, *(LONG if full else ())))


def alone(full: bool) -> tuple[Setting, ...]:
    """All that one device measures, the shortest first."""
    found = [s for s in settings() if s.ranks == 1] + list(held_lengths(full))
    return tuple(sorted(dict.fromkeys(found), key=lambda s: (s.tokens * max(s.segment_lengths), s.seq, s.heads)))


def over_ranks(sizes: tuple[int, ...]) -> tuple[Setting, ...]:
    """The settings of ranks, each with these numbers of them: the same sequence for all."""
    sequences = dict.fromkeys(replace(s, ranks=1) for s in group("ranks").values())
    return tuple(replace(s, ranks=ranks) for s in sorted(sequences, key=lambda s: s.tokens) for ranks in sizes)


def growing(sizes: tuple[int, ...], full: bool) -> tuple[Setting, ...]:
    """A sequence that is as many times longer as there are ranks, with segments that stay as they are."""
    return tuple(replace(HELD, seq=(LONG[2] if full else HELD.seq) * ranks, ranks=ranks) for ranks in sizes)
