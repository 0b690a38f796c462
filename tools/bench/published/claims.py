"""The figures that documents of older implementations published, each with the setting that measures it again.

They are data, in `claims.json`, where a claim names its settings and its note; `groups` name settings that a table compares.
What is known to be wrong with a claim is said in its note. All were taken on one or two GTX 1080, of the forward pass alone,
with 64 dimensions a head. A figure that a document's prose repeats appears once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dilkit.tools.bench.published.record import Setting
from dilkit.tools.results.decode import decode

CARD, CARD_TFLOPS = "GTX 1080", 8.9
"""The hardware of all claims (sm_61, 8 GB), and its fp32 arithmetic by its data sheet."""

HELD = tuple(Setting(1 << power, (512, 1024), (1, 2)) for power in range(11, 22))
"""The lengths of the published scaling, and longer ones, with segments that stay as they are, as users would have them."""


@dataclass(frozen=True, kw_only=True)
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
    setting: Setting | None = None
    base: Setting | None = None
    who: str = "auto"
    base_who: str = "auto"
    note: str = ""

    @property
    def hardware(self) -> str:
        """On what it was taken."""
        ranks = self.setting.ranks if self.setting else 2 if "2 GPUs" in self.figure else 1
        return CARD if ranks == 1 else f"{ranks} x {CARD}"


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
    return data


@cache
def claims() -> tuple[Claim, ...]:
    """All figures of the documents, in their order."""
    return tuple(_claim(document, row) for document, rows in _data()["documents"].items() for row in rows)


def _claim(document: str, row: dict[str, Any]) -> Claim:
    tables = dict(setting="settings", base="settings", note="notes")
    named = {field: _data()[table][row[field]] for field, table in tables.items() if field in row}
    return decode(Claim, {**row, **named, "document": document}, row["figure"])


@cache
def settings() -> tuple[Setting, ...]:
    """What has to be measured for all claims."""
    return tuple(decode(Setting, setting, name) for name, setting in _data()["settings"].items())


@cache
def group(name: str) -> dict[str, Setting]:
    """The settings of a group, by name."""
    return {one: decode(Setting, _data()["settings"][one], one) for one in _data()["groups"][name]}
