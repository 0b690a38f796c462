"""The result of `dilkit finetune-slide`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dilkit.integrations.gigapath.finetuning.record import Finetuning
from dilkit.tools.results.record import Result


@dataclass(frozen=True, kw_only=True)
class FinetuneResult(Result):
    """A slide encoder that was fine-tuned. `checkpoint`: the weights that it began with, None where these were random."""

    KIND: ClassVar[str] = "finetune-slide"

    checkpoint: str | None
    run: Finetuning
