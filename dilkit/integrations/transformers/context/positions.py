"""`Positions`: the positions that a model gives the tokens of a whole batch where none are handed in.

a model's own     Llama, GPT-2    0, 1, 2, ... along a row, padding included
                  OPT             a count of the tokens, by attention_mask
                  RoBERTa, ESM    a count of the ids that are no padding, from pad_token_id + 1 on

A rank that was given its rows alone would count these from its own first row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers.checks import arguments_of, source_of

BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies go by the largest position of a batch."""
COUNTS_MASK = re.compile(r"position_ids = (torch\.cumsum\(\w*attention_mask|attention_mask\S*\.cumsum)")
"""The source of a model's `forward` where it makes positions of its mask."""


@dataclass(frozen=True)
class Positions:
    """`by_mask`: tokens are counted. `padding`: ids that differ from it are, from the next number on.

    `limit`: with more positions than these, rotary embeddings choose their frequencies by the largest one; None: they never do.
    """

    by_mask: bool = False
    padding: int | None = None
    limit: int | None = None

    @classmethod
    def of_model(cls, model: Any) -> Positions:
        """Return the positions of a model, by its embeddings. Raises ValueError for a model that takes none."""
        parts = list(model.modules())
        kinds: set[Any] = {type(part) for part in parts if hasattr(part, "config")}
        if not any("position_ids" in arguments_of(kind) for kind in kinds):
            raise ValueError(f"{type(model).__name__} takes no position_ids: it would count positions from a rank's first row on")
        counting = next((part for part in parts if hasattr(part, "create_position_ids_from_inputs_embeds")), None)
        if getattr(counting, "position_embedding_type", None) == "rotary":  # of ESM, which counts rows
            counting = None
        by_mask = any(COUNTS_MASK.search(source_of(kind.forward)) for kind in kinds)
        return cls(by_mask, None if counting is None else counting.padding_idx, _limit(model.config.get_text_config()))

    def of_rows(self, rows: dict[str, Tensor], tokens: Tensor | None) -> Tensor:
        """Return `(batch or 1, seq)` for a batch `rows`, of which bool `tokens` says which are no padding.

        Raises ValueError for padding that no mask names, where it has no number of its own.
        """
        ids, like = rows.get("input_ids"), next(iter(rows.values()))
        if self.padding is not None and ids is not None:
            counted = ids != self.padding
            if not bool((counted if tokens is None else counted | ~tokens).all()):
                raise ValueError(
                    f"input_ids has {self.padding}, pad_token_id, which the model gives no position of its own, where "
                    "attention_mask does not leave it out; give position_ids, or another token"
                )
            return counted.cumsum(1) + self.padding
        if self.by_mask and tokens is not None:
            return tokens.cumsum(1) - 1
        return torch.arange(like.shape[1], device=like.device)[None] + (0 if self.padding is None else self.padding + 1)

    def check(self, positions: Tensor) -> None:
        """Raise ValueError for positions by which ranks would choose other frequencies than the whole batch."""
        if self.limit is not None and (most := int(positions.max()) + 1) > self.limit:
            raise ValueError(
                f"the batch has {most} positions, and beyond {self.limit} (original_max_position_embeddings) the model's rotary "
                "embedding goes by the largest one, which ranks do not share; give shorter sequences, or another rope_type"
            )


OF_ROWS = Positions()
"""0, 1, 2, ... along a row."""


def _limit(config: Any) -> int | None:
    """Return the number of positions from which rotary embeddings of a model choose their frequencies by the largest one."""
    stated = getattr(config, "rope_parameters", None) or {}
    kinds = [stated] if "rope_type" in stated else [kind for kind in stated.values() if isinstance(kind, dict)]
    lengths = (
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if any(name in kind.get("rope_type", "") for name in BY_LENGTH)
    )
    return min(lengths, default=None)
