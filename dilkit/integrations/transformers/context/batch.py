"""A batch of a language model, made ready to be cut along its sequence.

input_ids (batch, seq)      A A A .         packed (1, total)    A A A B B B B       without padding it stays (batch, seq)
                            B B B B         cu_seqlens           0     3       7
labels                      a1 a2 a3 -      shift_labels         a2 a3 - b2 b3 b4 -
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dilkit.integrations.transformers.context.positions import OF_ROWS, Positions
from dilkit.integrations.transformers.packing import of_positions
from dilkit.integrations.transformers.sequences import packing_given
from dilkit.integrations.transformers.token_mask import gaps

IGNORED = -100
"""The label of a row that predicts nothing."""
BY_ROWS = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "labels", "shift_labels")
"""The tensors of a batch that have a row for each token."""
DESCRIBES = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch")
"""Other entries that a batch may have: which rows are tokens, where sequences begin, and how many labels there are."""


@dataclass(frozen=True)
class WholeBatch:
    """`rows`: tensors `(batch, seq, ...)` by the names that models have for them. `cu_seqlens`: of a batch that is packed.

    `by_positions`: positions, which were given, begin anew or do not begin at 0: what one process makes of that is for the model.
    """

    rows: dict[str, Tensor]
    cu_seqlens: Tensor | None
    by_positions: bool = False

    @property
    def seq(self) -> int:
        """Rows of each element of the batch."""
        return next(iter(self.rows.values())).shape[1]

    @property
    def labelled(self) -> int:
        """Rows that predict a token."""
        labels = self.rows.get("shift_labels")
        return 0 if labels is None else int((labels != IGNORED).sum())


def whole_batch(batch: Mapping[str, Any], positions: Positions = OF_ROWS, window: int | None = None) -> WholeBatch:
    """Return `batch` with labels shifted, the `positions` of the model written out, and without padding.

    `window`: the model's own, which counts padding.

    Raises ValueError or TypeError for what cannot be cut.
    """
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
                f"attention_mask has padding between tokens, but sliding_window={window} of the model counts padding, and dilkit "
                "leaves it out; put padding before or after the tokens"
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
    """Return `(batch, seq)`, the same of all tensors."""
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
