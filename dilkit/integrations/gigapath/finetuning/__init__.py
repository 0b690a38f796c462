"""Fine-tuning of a slide encoder for classes of slides or for survival: `read_labels`, `look_through`, `finetune`.

    labels.py       the table of slides
    splits.py       who is learnt from and who is judged, patient by patient
    slides.py       files of tile features
    settings.py     how training goes
    model.py        the encoder that training begins with, and the head
    objectives.py   cross entropy, and Cox's partial likelihood
    training.py     the steps, their gradients, saved and resumed
    metrics.py      AUROC, C-index and their intervals
    record.py       what was found
    run.py          all of it
    proof.py        what is learnt of those

Names are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

_HOMES = {
    "Finetuning": "record",
    "Settings": "settings",
    "finetune": "run",
    "look_through": "slides",
    "read_labels": "labels",
    "split_examples": "splits",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.finetuning.labels import read_labels as read_labels
    from dilkit.integrations.gigapath.finetuning.record import Finetuning as Finetuning
    from dilkit.integrations.gigapath.finetuning.run import finetune as finetune
    from dilkit.integrations.gigapath.finetuning.settings import Settings as Settings
    from dilkit.integrations.gigapath.finetuning.slides import look_through as look_through
    from dilkit.integrations.gigapath.finetuning.splits import split_examples as split_examples

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
