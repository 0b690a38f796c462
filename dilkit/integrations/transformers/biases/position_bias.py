"""`PositionBias`: what a layer hands to the attention function in place of a tensor of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.bias.base import Bias


@dataclass(frozen=True, eq=False)
class PositionBias:
    """`make`: the bias of a call, made anew for each layer; None in cross-attention, which has none.

    `counts_padding`: whether distances between tokens of a padded batch count the padding between them.
    """

    make: Callable[[], Bias] | None
    counts_padding: bool = True

    @property
    def is_of_other_states(self) -> bool:
        """Whether it is that of cross-attention."""
        return self.make is None

    def of_call(self, tokens: Tensor | None, kind: str, device: torch.device) -> Bias | None:
        """The bias as dilkit takes it, on `device`: later layers may lie on another than the first, whose table it is.

        `tokens`, bool `(batch, seen)`: which keys are tokens; None means all. Raises ValueError, naming `kind`, the layer's
        class, where padding lies between tokens and distances count it.
        """
        if self.make is None:
            return None
        if tokens is not None and self.counts_padding:
            _check_runs(tokens, kind)
        made = self.make()
        return made.with_weights(made.weights.to(device))


def _check_runs(tokens: Tensor, kind: str) -> None:
    runs = tokens[:, 0].int() + (tokens.int().diff(dim=1) == 1).sum(1)
    if torch.compiler.is_compiling():
        torch._assert_async((runs <= 1).all(), f"attention_mask of {kind} has padding between tokens, and a position bias")
    elif bool((runs > 1).any()):
        raise ValueError(
            f"attention_mask of {kind} has padding between tokens, but distances of its position bias count padding, and dilkit "
            "leaves it out; put padding before or after the tokens"
        )
