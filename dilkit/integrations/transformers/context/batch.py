"""A batch of a language model, made ready to be cut along its sequence, with the `Positions` that the model gives its tokens.

input_ids (batch, seq)      A A A .         packed (1, total)    A A A B B B B       without padding it stays (batch, seq)
                            B B B B         cu_seqlens           0     3       7
labels                      a1 a2 a3 -      shift_labels         a2 a3 - b2 b3 b4 -

positions of Llama, GPT-2   0, 1, 2, ... along a row, padding included
             OPT            a count of the tokens, by attention_mask
             RoBERTa, ESM   a count of the ids that are no padding, from pad_token_id + 1 on
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.integrations.transformers.biases.tables import has_table
from dilkit.integrations.transformers.checks import arguments_of, source_of
from dilkit.integrations.transformers.sequences import gaps, of_positions, packing_given

BY_LENGTH = ("dynamic", "longrope")
COUNTS_MASK = re.compile(r"position_ids = (torch\.cumsum\(\w*attention_mask|attention_mask\S*\.cumsum)")


@dataclass(frozen=True)
class Positions:
    """`by_mask`: tokens are counted; `padding`: other ids are; `limit`: beyond it, rotary frequencies go by the largest one."""

    by_mask: bool = False
    padding: int | None = None
    limit: int | None = None

    @classmethod
    def of_model(cls, model: Any) -> Positions:
        """Return the positions of a model, by its embeddings. Raises ValueError for a model that takes none."""
        parts = list(model.modules())
        kinds: set[Any] = {type(part) for part in parts if hasattr(part, "config")}
        if not any("position_ids" in arguments_of(kind) or has_table(kind) for kind in kinds):
            raise ValueError(f"{type(model).__name__} takes no position_ids: it would count positions from a rank's first row on")
        counting = next((part for part in parts if hasattr(part, "create_position_ids_from_inputs_embeds")), None)
        if getattr(counting, "position_embedding_type", None) == "rotary":  # of ESM, which counts rows
            counting = None
        by_mask = any(COUNTS_MASK.search(source_of(kind.forward)) for kind in kinds)
        return cls(by_mask, None if counting is None else counting.padding_idx, _limit(model.config.get_text_config()))

    def of_rows(self, rows: dict[str, Tensor], tokens: Tensor | None) -> Tensor:
        """Return positions `(batch or 1, seq)`. Raises ValueError for padding that has no number and that no mask names."""
        ids, like = rows.get("input_ids"), next(iter(rows.values()))
        if self.padding is not None and ids is not None:
            counted = ids != self.padding
            if not bool((counted if tokens is None else counted | ~tokens).all()):
                raise ValueError(
                    f"input_ids has {self.padding}, pad_token_id, which has no position in the model, and attention_mask "
                    "shows it as a token; give position_ids, or another token"
                )
            return counted.cumsum(1) + self.padding
        if self.by_mask and tokens is not None:
            return tokens.cumsum(1) - 1
        return torch.arange(like.shape[1], device=like.device)[None] + (0 if self.padding is None else self.padding + 1)

    def check(self, positions: Tensor) -> None:
        if self.limit is not None and (most := int(positions.max()) + 1) > self.limit:
            raise ValueError(
                f"the batch has {most} positions, and beyond {self.limit} (original_max_position_embeddings) the model's rotary "
                "embedding goes by the largest one, which ranks do not share; give shorter sequences, or another rope_type"
            )


OF_ROWS = Positions()


def _limit(config: Any) -> int | None:
    stated = getattr(config, "rope_parameters", None) or {}
    kinds = [stated] if "rope_type" in stated else [kind for kind in stated.values() if isinstance(kind, dict)]
    lengths = (
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if any(name in kind.get("rope_type", "") for name in BY_LENGTH)
    )
    return min(lengths, default=None)


IGNORED = -100
BY_ROWS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "labels", "shift_labels")
DESCRIBES = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch")


@dataclass(frozen=True)
class WholeBatch:
    """`rows`: tensors `(batch, seq, ...)` by name; `cu_seqlens`: of a packed batch.

    `by_positions`: given positions restart or not at 0; what one process makes of that is for the model.
    """

    rows: dict[str, Tensor]
    cu_seqlens: Tensor | None
    by_positions: bool = False

    @property
    def seq(self) -> int:
        return next(iter(self.rows.values())).shape[1]

    @property
    def labelled(self) -> int:
        labels = self.rows.get("shift_labels")
        return 0 if labels is None else int((labels != IGNORED).sum())


def whole_batch(batch: Mapping[str, Any], positions: Positions = OF_ROWS, window: int | None = None) -> WholeBatch:
    """Return `batch` with shifted labels, positions, and no padding, which a `window` counts. Raises ValueError or TypeError."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch is a {type(batch).__name__}; a mapping is needed, such as dict(input_ids=tokens, labels=tokens)")
    batch = {name: value for name, value in batch.items() if value is not None}
    if unknown := sorted(batch.keys() - {*BY_ROWS, *DESCRIBES}):
        raise ValueError(f"batch has {', '.join(map(repr, unknown))}; what is cut along the sequence is {', '.join(BY_ROWS)}")
    shape = _shape(batch)
    rows = {name: batch[name] for name in BY_ROWS if name in batch}
    if "labels" in rows and "shift_labels" not in rows:
        rows["shift_labels"] = F.pad(rows["labels"], (0, 1), value=IGNORED)[:, 1:]
    tokens, has_positions = batch["attention_mask"].bool() if "attention_mask" in batch else None, "position_ids" in rows
    if not has_positions:
        rows["position_ids"] = positions.of_rows(rows, tokens)
    rows["position_ids"] = rows["position_ids"].expand(shape)
    padded = tokens is not None and not bool(tokens.all())
    if batch.get("cu_seq_lens_q") is not None:
        return WholeBatch(_in_one_row(rows), packing_given(shape[0] * shape[1], padded, batch).cu_seqlens)
    if tokens is not None and padded:
        if window is not None and shape[1] > window and bool(gaps(tokens)):
            raise ValueError(
                "attention_mask has padding between tokens, which windows and position biases of the model count, and dilkit "
                "leaves out; put padding before or after the tokens"
            )
        lengths = tokens.sum(1)
        cu_seqlens = F.pad(lengths[lengths > 0].cumsum(0), (1, 0)).int()
        return WholeBatch({name: x[tokens][None] for name, x in rows.items()}, cu_seqlens)
    packing = of_positions(rows["position_ids"], shape[0]) if has_positions else None
    if packing is None:
        return WholeBatch(rows, None, has_positions and bool((rows["position_ids"][:, 0] > 0).any()))
    if tokens is not None:
        raise ValueError(
            "position_ids begin anew or jump within a row, but with an attention_mask transformers takes the row for one "
            "sequence; leave attention_mask out, or give cu_seq_lens_q and cu_seq_lens_k"
        )
    return WholeBatch(_in_one_row(rows), packing.cu_seqlens, by_positions=True)


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    shapes = {name: tuple(batch[name].shape[:2]) for name in (*BY_ROWS, "attention_mask") if name in batch}
    first = next((name for name in ("input_ids", "inputs_embeds") if name in shapes), None)
    if first is None:
        raise ValueError(f"batch has {sorted(batch) or 'nothing'}; input_ids or inputs_embeds (batch, seq) are needed")
    count, seq = shapes[first]
    for name, shape in shapes.items():
        fits = shape == (count, seq) or (name == "position_ids" and shape == (1, seq))
        if not fits or batch[name].ndim != 2 + (name == "inputs_embeds"):
            raise ValueError(f"{name} has shape {tuple(batch[name].shape)}, but {first} is of {count} sequences of {seq} tokens")
    return count, seq


def _in_one_row(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.flatten(0, 1)[None] for name, x in rows.items()}
