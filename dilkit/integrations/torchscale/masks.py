"""Whether a padding mask hides anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor

from dilkit.device import capturing


class MaskMemory:
    """Looks at each mask once, not once in each layer.

    torchscale's encoder makes a mask for every call, all False unless it was given one, and hands it to each of its layers. A
    call with a mask is slower than one without, but looking at a mask on a GPU waits for the GPU. So a mask outside the CPU is
    looked at in the first layer, and again only after torch has written to it.
    """

    def __init__(self) -> None:
        self._last: tuple[Callable[[], Tensor | None], int, bool] = (lambda: None, 0, True)

    def hides(self, mask: Tensor) -> bool:
        """Whether `mask`, bool, has a True. It counts as having one where that cannot be found out or remembered."""
        if torch.compiler.is_compiling():
            return True
        if mask.device.type == "cpu":
            return _look(mask)
        if mask.is_inference() or capturing(mask.device):
            return True
        last, version, answer = self._last
        if last() is not mask or version != mask._version:
            answer = _look(mask)
            self._last = ref(mask), mask._version, answer
        return answer


def _look(mask: Tensor) -> bool:
    """Whether the mask hides anything. Warns where it hides a whole sequence, as masks of tokens do, the other way round."""
    hides = bool(mask.any())
    if hides and int(mask.sum(dim=-1).max()) == mask.shape[-1]:
        warnings.warn(
            "key_padding_mask hides every key of a sequence, whose rows see nothing; it is True where there is padding, "
            "~mask if yours says where tokens are",
            stacklevel=2,
        )
    return hides
