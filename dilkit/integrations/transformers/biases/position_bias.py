"""`PositionBias`: the value that a layer hands to the attention function in place of a tensor of all pairs."""

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
        """True for the bias of cross-attention."""
        return self.make is None

    def of_call(self, mask: TokenMask | None, kind: str, device: torch.device) -> Bias | None:
        """Make the bias on `device`: later layers may lie on another device than the first, which owns the table.

        Raises ValueError, naming `kind`, the layer's class, where padding lies between tokens and distances count it.
        """
        if self.make is None:
            return None
        if mask is not None and self.counts_padding:
            mask.check_gaps(kind, "distances of its position bias count")
        bias = self.make()
        return bias.with_weights(bias.weights.to(device))
