"""What the published tables are measured at: their own settings, the same as users would have them, and over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dilkit.tools.bench.published.claims import HELD, group, settings
from dilkit.tools.bench.published.record import Setting
from dilkit.tools.bench.suite import Sizes
from dilkit.tools.commands.bench import PEERS

HELD_AT_FIRST = 5
"""Of `held`, so many are not left to --full."""


def _sequences() -> tuple[Setting, ...]:
    sequences = {replace(setting, ranks=1) for setting in group("ranks").values()}
    return tuple(sorted(sequences, key=lambda s: (s.tokens, s.seq)))


@dataclass(frozen=True)
class PublishedSizes(Sizes):
    """Settings on one device: those `alone`, and `held`; `cached`, whose plans are cached; over `ranks`: `sequences`, and one
    `growing` with them, without and with --full.

    `peers`: packages beside dilkit. `memory`, and with --full `card_memory`: bytes into which the longest sequence must fit, to
    one part in `grains` of them.
    """

    alone: tuple[Setting, ...] = field(default_factory=lambda: tuple(s for s in settings() if s.ranks == 1))
    held: tuple[Setting, ...] = HELD
    cached: tuple[Setting, ...] = field(default_factory=lambda: tuple(group("orders").values()))
    sequences: tuple[Setting, ...] = field(default_factory=_sequences)
    growing: tuple[Setting, Setting] = (HELD[0], HELD[7])
    ranks: tuple[int, ...] = (1, 2, 4)
    peers: tuple[str, ...] = PEERS
    memory: int = 128 << 20
    card_memory: int = 8 << 30
    grains: int = 1 << 18

    def on_one_device(self, full: bool) -> tuple[Setting, ...]:
        """The shortest first."""
        once = dict.fromkeys([*self.alone, *self.held[: None if full else HELD_AT_FIRST]])
        return tuple(sorted(once, key=lambda s: (s.tokens * max(s.segment_lengths), s.seq, s.heads)))

    def over_ranks(self, quick: bool) -> tuple[Setting, ...]:
        """Sequences that stay as they are."""
        return tuple(replace(s, ranks=ranks) for s in self.sequences for ranks in self.ranks[: 2 if quick else None])

    def grown(self, full: bool, quick: bool) -> tuple[Setting, ...]:
        """A sequence as many times as long as there are ranks."""
        one = self.growing[full]
        return tuple(replace(one, seq=one.seq * ranks, ranks=ranks) for ranks in self.ranks[: 2 if quick else None])
