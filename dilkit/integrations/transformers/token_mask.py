"""`TokenMask`: the value that the mask function hands to the attention function.

mask function    which keys are tokens, which rows are of one sequence, causal or not    -> TokenMask
transformers     hands it to each layer, unread
attention        reads it; a model that computes with it by itself does not look its attention up by name, and is refused
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from dilkit.integrations.transformers.packing import Packing

COMPUTED_WITH = (
    "the model computes with its attention mask by itself, for attention of its own or to choose keys, which dilated attention "
    "does not take the place of; use another attn_implementation"
)


@dataclass(frozen=True, eq=False)
class TokenMask:
    """The tokens among the keys of a call with `rows` queries and `keys` keys, and the sequences of its rows.

    - `causal`: whether a row sees none after it; None where `torch.compile` hides it: the layer says it then.
    - `tokens`: bool `(batch, seen)`, True for tokens, of the keys seen so far; None means that all keys are.
    - `packing`: the sequences that the rows are of; None where each element of the batch is one.

    It is no tensor, so that nothing can be computed with it unnoticed: CodeGen, for one, takes a mask from transformers'
    function, but adds it to scores of its own. Raises ValueError there.
    """

    causal: bool | None
    rows: int
    keys: int
    tokens: Tensor | None = None
    packing: Packing | None = None

    ndim: ClassVar[int] = 0  # transformers reads it of a mask that it gets back, and converts those of 2

    def to(self, device: torch.device | torch.dtype | str | int, **options: Any) -> TokenMask:
        """Move the mask to another device, for models on several. A dtype, which MPT asks for, changes nothing."""
        if isinstance(device, torch.dtype):
            return self
        tokens = None if self.tokens is None else self.tokens.to(device, **options)
        packing = None if self.packing is None else self.packing.to(device, **options)
        return replace(self, tokens=tokens, packing=packing)

    def check_gaps(self, kind: str, what: str, harmless: int = 0) -> None:
        """Raise ValueError where padding lies between tokens, but `what` of a layer of class `kind` counts padding.

        Masks of up to `harmless` tokens may have such padding.
        A step of one row is not waited for on a GPU: there torch ends the program later, as it does under `torch.compile`.
        """
        if self.tokens is None:
            return
        reason = (
            f"attention_mask of {kind} has padding between tokens, but {what} padding, and dilkit leaves it out; put padding "
            "before or after the tokens"
        )
        if torch.compiler.is_compiling() or (self.rows == 1 and self.tokens.is_cuda):
            last = torch.arange(self.tokens.shape[1], device=self.tokens.device)[-1]  # not a number, by which graphs would differ
            torch._assert_async(~(gaps(self.tokens) & (last >= harmless)), reason)
        elif self.tokens.shape[1] > harmless and self._has_gaps:
            raise ValueError(reason)

    @cached_property
    def _has_gaps(self) -> bool:
        """True if padding lies between tokens. Looked at once, not in each layer: on a GPU it is waited for."""
        return self.tokens is not None and bool(gaps(self.tokens))

    def contiguous(self) -> TokenMask:
        """Return itself; `generate` calls it."""
        return self

    def view(self, *shape: int) -> TokenMask:
        """Return itself; GPT-2 flattens a mask that `generate` has made for a static cache."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ValueError(f"{getattr(func, '__name__', func)} of a TokenMask: {COMPUTED_WITH}")

    def __getitem__(self, index: Any) -> NoReturn:
        raise ValueError(f"a part of a TokenMask: {COMPUTED_WITH}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a TokenMask has no {name!r}: {COMPUTED_WITH}")


def gaps(tokens: Tensor) -> Tensor:
    """True if padding lies between the tokens of any sequence, bool `()`, of `tokens` `(batch, seen)`."""
    begins = tokens[:, 0].int() + (tokens.int().diff(dim=1) == 1).sum(1)
    return (begins > 1).any()
