"""The sequences that the rows of a call are of: `Packing`, `TokenMask`, and the decision, for one process and for ranks alike.

tokens (batch, seq)    . . A A A        rows that are packed    A A A B B B B B
                       B B B B B        cu_seqlens              0     3         8

cu_seq_lens_q                                    its sequences
positions that restart or jump in a row       cut there, where the model's mask is; else one sequence
positions that do not begin at 0                 one sequence, with a warning

Under `torch.compile` no shape may depend on the numbers in a tensor: there all rows are packed, padding behind the tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Packing:
    """Offsets of packed sequences, their most tokens, and batch and place of each packed row; None means all, as they are."""

    cu_seqlens: Tensor
    longest: int
    rows: tuple[Tensor, ...] | None = None

    def to(self, device: torch.device | str | int, **options: Any) -> Packing:
        rows = None if self.rows is None else tuple(places.to(device, **options) for places in self.rows)
        return Packing(self.cu_seqlens.to(device, **options), self.longest, rows)

    def pack(self, x: Tensor) -> Tensor:
        """Reshape `(batch, seq, heads, head_dim)` to `(total, heads, head_dim)`."""
        return x.flatten(0, 1) if self.rows is None else x[self.rows]

    def unpack(self, packed: Tensor, batch: int, seq: int) -> Tensor:
        """Move `(total, heads, head_dim)` to `(batch, seq, heads, head_dim)`, 0 where there is no token."""
        if self.rows is None:
            return packed.view(batch, seq, *packed.shape[1:])
        return packed.new_zeros(batch, seq, *packed.shape[1:]).index_put(self.rows, packed)


def of_tokens(tokens: Tensor) -> Packing:
    """Pack the tokens, bool `(batch, seq)`, of a padded batch: one sequence for each element of the batch."""
    seq, lengths = tokens.shape[1], tokens.sum(1)
    ends = F.pad(lengths.cumsum(0), (1, 0))
    if not torch.compiler.is_compiling():
        return Packing(ends.int(), seq, tokens.nonzero(as_tuple=True))
    total = tokens.numel()
    order = (~tokens).flatten().to(torch.int8).argsort(stable=True)
    alone = (ends[-1] + torch.arange(1, total + 1, device=tokens.device)).clamp(max=total)  # each row of padding by itself
    return Packing(torch.cat((ends, alone)).int(), seq, (order // seq, order % seq))


def of_positions(position_ids: Tensor, batch: int) -> Packing | None:
    """Pack sequences that begin where positions `(batch or 1, seq)` do not go on by 1; None where all rows are one sequence."""
    goes_on = position_ids.diff() == 1
    return of_neighbours(goes_on.expand(batch, goes_on.shape[1]))


def of_neighbours(goes_on: Tensor) -> Packing | None:
    """Pack by `goes_on`, bool `(batch, seq - 1)`: True where a row continues the one before; None if all do, unless compiled."""
    if not torch.compiler.is_compiling() and bool(goes_on.all()):
        return None
    begins, (batch, before) = ~F.pad(goes_on, (1, 0)).flatten(), goes_on.shape
    total = batch * (before + 1)
    places = torch.arange(total + 1, device=begins.device)
    rows, end = places[:-1], places[-1:]  # not the number: torch.compile would make one graph for each
    starts = rows.where(begins, end).sort().values if torch.compiler.is_compiling() else rows[begins]
    return Packing(torch.cat((starts, end)).int(), before + 1)


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
    - `intervals`: the keys that each row sees, as `intervals=` of `dilkit.dilated_attention` but for the number of rows, and all
      there is to the mask; None where positions, tokens and a pattern say it.
    - `make`: makes the mask of another attention, by its name, for layers that keep it; None under `torch.compile`.
    - `shows`: the pattern that transformers' own mask has, as text, since FSDP2 looks into dataclasses; None where it is not
      known, as under `torch.compile`.

    It is no tensor, so that a model that computes with it, such as CodeGen, raises ValueError.
    """

    causal: bool | None
    rows: int
    keys: int
    tokens: Tensor | None = None
    packing: Packing | None = None
    intervals: Tensor | None = None
    shows: str | None = None
    make: Callable[[str], Tensor | None] | None = None

    ndim: ClassVar[int] = 0  # transformers reads it of a mask that it gets back, and converts those of 2

    def to(self, device: torch.device | torch.dtype | str | int, **options: Any) -> TokenMask:
        """Move the mask to another device, for models on several. A dtype, which MPT asks for, changes nothing."""
        if isinstance(device, torch.dtype):
            return self
        parts: Any = {name: getattr(self, name) for name in ("tokens", "packing", "intervals")}
        return replace(self, **{name: part.to(device, **options) for name, part in parts.items() if part is not None})

    def has_gaps(self, harmless: int) -> bool:
        """True if padding lies between tokens, in more than `harmless` places. `torch.compile` refuses such padding."""
        if self.tokens is None or not torch.compiler.is_compiling():
            return self.tokens is not None and self.tokens.shape[1] > harmless and self._has_gaps
        last = torch.arange(self.tokens.shape[1], device=self.tokens.device)[-1]  # not a number, by which graphs would differ
        torch._assert_async(
            ~(gaps(self.tokens) & (last >= harmless)),
            "attention_mask has padding between tokens, and distances of the layer count it, which torch.compile cannot look at; "
            "put padding before or after the tokens",
        )
        return False

    @cached_property
    def _has_gaps(self) -> bool:
        """Looked at once, not in each layer: a GPU is waited for."""
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
    begins = tokens[:, 0].int() + (tokens.int().diff(dim=1) == 1).sum(1)
    return (begins > 1).any()


ACROSS = "dilkit_across"
"""The argument by which a wrapped layer says whether its keys are of another sequence."""
KEPT_BY = "dilkit_layer"
"""The attribute of the keys of new tokens that is the `DilatedLayer` which keeps what there was before."""

ONE_SEQUENCE = (
    "position_ids begin anew or jump within a row, but transformers' mask takes the row for one sequence, and so does dilkit. "
    "It is cut by positions only without attention_mask and without a cache (use_cache=False), and never in models that keep "
    "positions from their mask, such as gpt-oss. To cut it, give cu_seq_lens_q and cu_seq_lens_k"
)
_DIFFER = "differ; the same is needed: dilated attention is of one sequence with itself"


def packing_of(query: Tensor, key_rows: int, mask: TokenMask | None, options: dict[str, Any]) -> Packing | None:
    batch, rows = query.shape[:2]
    if options.get("cu_seq_lens_q") is not None:
        if key_rows != rows:
            raise ValueError("cu_seq_lens_q with keys from a cache; packed sequences have no cache (use_cache=False)")
        return packing_given(batch * rows, mask is not None and mask.tokens is not None, options)
    if mask is not None and (mask.packing is not None or mask.tokens is not None or torch.compiler.is_compiling()):
        return mask.packing
    positions = options.get("position_ids")
    if key_rows != rows or positions is None or positions.shape[1:] != (rows,):
        return None
    if not torch.compiler.is_compiling() and bool((positions[:, 0] > 0).any()):
        check_first(mask, int(positions[:, 0].max()))
    by_positions = of_positions(positions, batch)
    if by_positions is None or is_cut(mask):
        return by_positions
    warnings.warn(ONE_SEQUENCE, UserWarning, stacklevel=2)
    return None


def is_cut(mask: TokenMask | None) -> bool:
    """True if the mask of rows whose positions restart is cut there, or nobody made one; compiled, it may be cut nowhere."""
    if mask is None or mask.packing is None:
        return mask is None
    begins = mask.packing.cu_seqlens
    return bool((begins % mask.rows != 0).any())


def check_first(mask: TokenMask | None, first: int) -> None:
    """Warn that a sequence begins at position `first`, and there are no keys before. Raise ValueError if there is no mask."""
    what = (
        f"position_ids begin at {first}, but there are no keys of earlier positions: a part of a sequence, as under context "
        "parallelism, sees itself alone"
    )
    if mask is None:
        raise ValueError(f"{what}; give all rows of a sequence, or a cache with the keys before")
    warnings.warn(what, UserWarning, stacklevel=2)


def packing_given(total: int, padded: bool, options: Mapping[str, Any]) -> Packing:
    """Return the packing of `cu_seq_lens_q`. Raises ValueError for padding, or other sequences of the keys."""
    cu_seqlens, of_keys, longest = (options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"))
    assert cu_seqlens is not None
    if padded:
        raise ValueError("cu_seq_lens_q and an attention_mask with padding; packed sequences have none: leave the mask out")
    if of_keys is not None and (
        of_keys.shape != cu_seqlens.shape or not (torch.compiler.is_compiling() or torch.equal(of_keys, cu_seqlens))
    ):
        raise ValueError(f"cu_seq_lens_q, {tuple(cu_seqlens.shape)}, and cu_seq_lens_k, {tuple(of_keys.shape)}, {_DIFFER}")
    if of_keys is not None and torch.compiler.is_compiling():
        torch._assert_async((of_keys == cu_seqlens).all(), f"cu_seq_lens_q and cu_seq_lens_k {_DIFFER}")
    if longest is None or (isinstance(longest, Tensor) and torch.compiler.is_compiling()):
        longest = total  # the number in a tensor is not known there
    known: Any = longest if isinstance(longest, torch.SymInt) else int(longest)  # int() would make it a constant
    return Packing(cu_seqlens.int(), known)
