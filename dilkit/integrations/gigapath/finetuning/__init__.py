"""Fine-tuning of a slide encoder for classes of slides or for survival: `read_labels`, `look_through`, `finetune`.

Names are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

_NAMES = {
    "labels": "read_labels split_examples",
    "model": "look_through",
    "record": "Finetuning Settings",
    "run": "finetune",
}

__all__ = sorted(" ".join(_NAMES.values()).split())

if TYPE_CHECKING:
    from dilkit.integrations.gigapath.finetuning.labels import read_labels as read_labels, split_examples as split_examples
    from dilkit.integrations.gigapath.finetuning.model import look_through as look_through
    from dilkit.integrations.gigapath.finetuning.record import Finetuning as Finetuning, Settings as Settings
    from dilkit.integrations.gigapath.finetuning.run import finetune as finetune

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
