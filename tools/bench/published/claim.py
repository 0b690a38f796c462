"""A published figure, and the setting that measures it again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dilkit.pattern import Pattern

HEAD_DIM = 64
CARD, CARD_TFLOPS = "GTX 1080", 8.9
"""The hardware of all of them (sm_61, 8 GB), and its fp32 arithmetic by its data sheet."""


@dataclass(frozen=True)
class Setting:
    """What is measured: a forward pass of `batch` sequences of `seq` tokens, 64 dimensions a head."""

    seq: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    batch: int = 1
    heads: int = 8
    dtype: str = "float32"
    ranks: int = 1

    def __str__(self) -> str:
        """In a few words."""
        batch = f"{self.batch} x " if self.batch > 1 else ""
        lengths, rates = ("-".join(map(str, numbers)) for numbers in (self.segment_lengths, self.dilation_rates))
        return f"{batch}{self.seq:,} tokens, {self.heads} heads, {self.dtype}, w {lengths}, r {rates}"

    @property
    def pattern(self) -> Pattern:
        """LongNet's pattern of these segments and rates."""
        return Pattern(self.segment_lengths, self.dilation_rates)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq

    def divided(self, by: int) -> Setting:
        """The setting with lengths divided by `by`; rates stay, and no segment is shorter than its rate."""
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return replace(self, seq=self.seq // by, segment_lengths=tuple(max(w // by, r) for w, r in pairs))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, which `from_dict` reads."""
        return asdict(self) | dict(segment_lengths=list(self.segment_lengths), dilation_rates=list(self.dilation_rates))

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Setting:
        """The setting that `to_dict` told of."""
        found = {field.name: told[field.name] for field in fields(cls) if field.name in told}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})


@dataclass(frozen=True)
class Claim:
    """One published figure.

    `quantity` is what is read from the measurement of `setting`: "ms", "tokens/s", "tokens/rank" and, by rank, inputs counted,
    "MiB" and "KiB/token" at their peak; or of it and `base`: "speedup" (time of base over time), "slowdown" (the inverse),
    "reduction" (memory of base over memory), "efficiency" (the same in percent of the ranks), "saved" (memory saved in percent),
    "KiB/token ratio", "exponent" (of time in the length, from base to setting). Without a setting: "longest" (tokens that fit
    into a budget of memory). `who` is whose measurement, "auto" being the automatic choice. Any other claim without a setting is
    of something that nobody can measure: `note` says what it is.
    """

    document: str
    figure: str
    claimed: float
    quantity: str
    setting: Setting | None
    base: Setting | None = None
    who: str = "auto"
    base_who: str = "auto"
    note: str = ""

    @property
    def hardware(self) -> str:
        """On what it was taken."""
        ranks = self.setting.ranks if self.setting else 2 if "2 GPUs" in self.figure else 1
        return CARD if ranks == 1 else f"{ranks} x {CARD}"


def halves(seq: int) -> tuple[int, int]:
    """The segments of documents in which they grow with the sequence."""
    return seq // 4, seq // 2
