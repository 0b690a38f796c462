"""The sequences that the rows of a call are of: decided here for one process and for ranks alike.

cu_seq_lens_q                                    its sequences
positions that begin anew or jump in a row       cut there, where the model's mask is; else one sequence
positions that do not begin at 0                 one sequence, with a warning
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers.packing import Packing, of_positions
from dilkit.integrations.transformers.token_mask import TokenMask

ONE_SEQUENCE = (
    "position_ids begin anew or jump within a row, but transformers' mask takes the row for one sequence, and so does dilkit. "
    "It is cut by positions only without attention_mask and without a cache (use_cache=False), and never in models that keep "
    "positions from their mask, such as gpt-oss. To cut it, give cu_seq_lens_q and cu_seq_lens_k"
)
"""Said where a packed batch is not computed as one."""
_DIFFER = "differ; the same is needed: dilated attention is of one sequence with itself"


def packing_of(query: Tensor, key_rows: int, mask: TokenMask | None, options: dict[str, Any]) -> Packing | None:
    """Return the sequences of the rows of a call, `(batch, rows, heads, head_dim)`; None where each element is one."""
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
    """True if rows whose positions begin anew are several sequences: their mask is cut there too, or nobody made one.

    A mask that torch.compile made may be cut nowhere.
    """
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
