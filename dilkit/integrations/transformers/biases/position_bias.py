"""`PositionBias`: what a layer hands to the attention function in place of a tensor of all pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dilkit.bias.base import Bias
from dilkit.integrations.transformers.token_mask import TokenMask


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

    def of_call(self, mask: TokenMask | None, kind: str, device: torch.device) -> Bias | None:
        """The bias as dilkit takes it, on `device`: later layers may lie on another than the first, whose table it is.

        Raises ValueError, naming `kind`, the layer's class, where padding lies between tokens and distances count it.
        """
        if self.make is None:
            return None
        if mask is not None and self.counts_padding:
            _check_gaps(mask, kind)
        made = self.make()
        return made.with_weights(made.weights.to(device))


def _check_gaps(mask: TokenMask, kind: str) -> None:
    if torch.compiler.is_compiling():
        torch._assert_async(~mask.gaps(), f"attention_mask of {kind} has padding between tokens, and a position bias")
    elif mask.has_gaps:
        raise ValueError(
            f"attention_mask of {kind} has padding between tokens, but distances of its position bias count padding, and dilkit "
            "leaves it out; put padding before or after the tokens"
        )
