"""The weights of the projections of queries, keys and values in a state dict: packed in one tensor, or apart."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

PACKED = "in_proj_weight"
APART = "q_proj_weight", "k_proj_weight", "v_proj_weight"


def lay_out(state: MutableMapping[str, Tensor], prefix: str, packed: bool, cuts: Sequence[int]) -> None:
    """Put the weights of the layer at `prefix` into `state` as the layer has them: packed, or cut at the rows `cuts`.

    What `state` has in that layout already, or not in full, is left as it is.
    """
    whole, parts = prefix + PACKED, [prefix + name for name in APART]
    if packed and whole not in state and all(name in state for name in parts):
        state[whole] = torch.cat([state.pop(name) for name in parts])
    elif not packed and whole in state and not any(name in state for name in parts):
        state.update(zip(parts, state.pop(whole).tensor_split(cuts), strict=True))
