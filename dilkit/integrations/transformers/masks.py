"""The mask function: which of the keys that a call has seen are tokens, and which rows are of one sequence.

transformers asks it once for a kind of layer, and hands what it returns to each of them. `generate` hands it in again as the mask
of the next call, so that it must bear to be asked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.compiler import not_compiled
from dilkit.integrations.transformers.mask_intervals import mask_made_for, of_function
from dilkit.integrations.transformers.patterns import (
    CHUNKED,
    DENSE,
    FULL,
    WINDOWED,
    Patterns,
    is_of_windows,
    known_pattern,
    stated_patterns,
)
from dilkit.integrations.transformers.sequences import TokenMask, of_neighbours, of_tokens
from dilkit.pattern import Pattern

OVERLAYS = {
    "sliding_window_overlay": (WINDOWED, 0),
    "_bidirectional_window_overlay": (WINDOWED, 0),
    "sliding_window_bidirectional_overlay": (WINDOWED, 1),
    "chunked_overlay": (CHUNKED, 0),
}
"""Parts of masks that hide more than causality does: the kind of layer, and by how much its pattern's size is larger."""
OF_ENCODERS = {"_bidirectional_window_overlay", "Gemma3TextModel"}
"""Parts that EmbeddingGemma adds to causal masks, by `or_masks`, so that tokens see later ones."""
COMPUTED = {
    *("causal_mask_function", "bidirectional_mask_function", "packed_sequence_mask_function"),
    *("and_masks", "or_masks", "remap_positions_for_packed_sequence"),
    *OVERLAYS,
    *OF_ENCODERS,
}
"""Parts of transformers' masks that attention computes itself: positions say where packed sequences begin."""

WITHOUT_EFFECT = ("allow_is_causal_skip", "allow_is_bidirectional_skip", "dtype", "local_size")
"""Options that transformers asks for a mask with, and that do not change which keys are tokens."""


def tokens_seen(given: Patterns | None, *args: Any, **options: Any) -> TokenMask:
    """Make the mask of a call, as `_tokens_seen`, compiled wholly or not at all: functions of a mask are hidden in graphs.

    Where torch.compile gives a frame up, as after an error in it, it would still compile those that the frame calls.
    """
    return (_tokens_seen if torch.compiler.is_compiling() else _not_compiled)(given, *args, **options)


def _tokens_seen(
    given: Patterns | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | TokenMask | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    config: Any = None,
    **options: Any,
) -> TokenMask:
    """Make the mask of a call, whose rows are the last `q_length` tokens: which keys seen so far are tokens, and what is packed.

    `kv_offset` keys that a cache with a window has dropped are left out. One row against a cache of fixed size gets tokens
    `(batch, kv_length)`, so that shapes stay. Parts of the mask that no pattern has make it one of pairs. Raises ValueError for
    one beside a pattern, and for a pattern that sees dropped keys.
    """
    if isinstance(attention_mask, TokenMask):
        return attention_mask
    if torch.compiler.is_compiling() and q_length > 1 and isinstance(q_offset, Tensor):  # here: a graph that breaks begins anew
        raise ValueError(
            f"{q_length} rows against a cache of fixed size, compiled: their place is unknown; "
            "leave the prompt out of torch.compile, as `generate` does"
        )
    _check_shape(attention_mask, kv_length)
    stated = stated_patterns(given, config)
    make, part = None, _of_pairs(mask_function, use_vmap, config, options, stated)
    if not torch.compiler.is_compiling():
        offset = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset  # a cache of fixed size adds to its own
        asked: dict[str, Any] = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=offset)
        asked |= dict(kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask)
        asked |= dict(use_vmap=use_vmap, device=device or "cpu")
        make = partial(mask_made_for, **asked, config=config, **options)
    if part is not None:
        pairs = of_function(part, **asked)
        return TokenMask(False, q_length, kv_length, intervals=pairs, make=make)
    causal = _is_causal(mask_function, config, options)
    shows = None if stated or mask_function is None or torch.compiler.is_compiling() else _shown(mask_function)
    mask = partial(TokenMask, causal, q_length, kv_length, shows=None if shows is None else shows.to_json(), make=make)
    if causal is False and q_length != kv_length:  # the keys are of another sequence
        return mask(_tokens(batch_size, kv_length, kv_length, attention_mask, device))
    if torch.compiler.is_compiling() and causal and q_length > 1 and _is_composed(mask_function):
        before = torch.arange(q_length - 1, device=device) + q_offset
        ahead = _sees(mask_function, batch_size, before, before + 1)
        torch._assert_async(~ahead.any(), "the model's mask lets tokens see later ones, which dilated attention does not compute")
    if kv_offset:
        unused = stated is None and shows == DENSE and FULL not in (getattr(config, "layer_types", None) or (FULL,))
        size, held = getattr(config, "attention_chunk_size", None), kv_length - q_length
        if size and held >= size - 1 and shows == known_pattern(CHUNKED, size):
            if attention_mask is None:
                attention_mask = torch.ones(batch_size, kv_offset + kv_length, dtype=torch.bool, device=device)
            attention_mask = _of_whole_chunks(attention_mask, size, kv_offset)
        elif not unused:  # models of windows alone ask for a mask without, too
            _check_kept(stated or shows, config, held, kv_offset)
        q_offset = q_offset - kv_offset
        if attention_mask is not None:
            attention_mask = attention_mask[:, kv_offset:]
    return _of_places(mask, mask_function, batch_size, q_length, kv_length, q_offset, attention_mask, device)


_not_compiled = not_compiled(_tokens_seen)


def _of_places(
    mask: Callable[..., TokenMask],
    mask_function: Callable[..., Any] | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    attention_mask: Tensor | None,
    device: torch.device | None,
) -> TokenMask:
    """Make the mask by the places of its rows: one row of a cache, tokens beside padding, or packed sequences."""
    if q_length == 1 and (isinstance(q_offset, Tensor) or q_offset + 1 < kv_length):
        return mask(_one_row(batch_size, kv_length, q_offset, attention_mask, device))
    if isinstance(q_offset, Tensor):
        q_offset = int(q_offset)
    tokens = _tokens(batch_size, q_offset + q_length, kv_length, attention_mask, device)
    if tokens is not None:
        return mask(tokens, of_tokens(tokens) if tokens.shape[1] == q_length else None)
    if attention_mask is None and kv_length == q_length and _may_be_packed(mask_function):
        rows = torch.arange(1, q_length, device=device)
        return mask(None, of_neighbours(_sees(mask_function, batch_size, rows, rows - 1)))
    return mask()


def _tokens(batch: int, seen: int, kv_length: int, attention_mask: Tensor | None, device: torch.device | None) -> Tensor | None:
    """Return bools `(batch, seen)`; None where all `kv_length` keys are tokens."""
    if attention_mask is None:
        return None if seen == kv_length else torch.ones(batch, seen, dtype=torch.bool, device=device)
    if attention_mask.shape[1] < seen:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but {seen} tokens have been seen; (batch, {seen}) is needed"
        )
    tokens = attention_mask[:, :seen].bool()
    return None if seen == kv_length and not torch.compiler.is_compiling() and bool(tokens.all()) else tokens


def _one_row(
    batch: int, kv_length: int, q_offset: int | Tensor, attention_mask: Tensor | None, device: torch.device | None
) -> Tensor:
    written = torch.arange(kv_length, device=device) <= q_offset
    if attention_mask is None:
        return written.expand(batch, kv_length)
    tokens = attention_mask[:, :kv_length].bool()
    return F.pad(tokens, (0, kv_length - tokens.shape[1])) & written


def _check_shape(attention_mask: Tensor | None, keys: int) -> None:
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; (batch, {keys}), which of the keys are tokens, is needed: "
            "the pattern defines which keys a query sees"
        )


def _of_pairs(
    mask_function: Callable[..., Any] | None, use_vmap: bool, config: Any, options: dict[str, Any], stated: Patterns | None
) -> str | None:
    """Return the name of a part of the mask that no pattern has. Raises ValueError where it cannot be asked."""
    if unknown := sorted(name for name, x in options.items() if name not in WITHOUT_EFFECT and x is not None):
        raise ValueError(
            f"transformers asks for a mask with {', '.join(unknown)}, which dilkit does not know; use another "
            "attn_implementation, or an earlier version of transformers"
        )
    if torch.compiler.is_compiling():  # which hides the functions: the configuration decides
        if use_vmap or getattr(config, "attention_chunk_size", None):
            name = "chunked_overlay" if not use_vmap else "of a function of its own (or_mask_function, and_mask_function)"
            raise ValueError(
                f"the model asks for the mask {name}, which dilated attention does not compute under torch.compile; use another "
                "attn_implementation"
            )
        return None
    names = set() if mask_function is None else {name for name, _ in _parts(mask_function)}
    added = "or_masks" in names and not names & OF_ENCODERS
    part = min(names - COMPUTED, default="or_masks" if added else None)
    if part is not None and stated is not None and (stated != DENSE or not names.isdisjoint(OVERLAYS)):
        raise ValueError(
            f"the model asks for the mask {part}, which says what each row sees, and so does {stated}; give no pattern, or use "
            "another attn_implementation"
        )
    return part


def _check_kept(stated: Patterns | None, config: Any, before: int, left_out: int) -> None:
    types = getattr(config, "layer_types", None)
    patterns = (stated,) if isinstance(stated, Pattern) else stated or ()
    for layer, pattern in enumerate(patterns):
        windowed = isinstance(stated, Pattern) or not types or types[layer] in (WINDOWED, CHUNKED)
        if windowed and pattern is not None and not is_of_windows(pattern, before):
            raise ValueError(
                f"the cache keeps the last {before} tokens of layers with a window, and has left out {left_out}, but the pattern "
                f"is {pattern}; give one that keeps all (past_key_values=DynamicCache()), or windows of up to {before + 1} tokens"
            )


def _of_whole_chunks(attention_mask: Tensor, size: int, left_out: int) -> Tensor:
    """Hide the rest of a chunk whose first tokens a cache has left out, so that chunks begin at the first key that is seen.

    No row sees it: the cache keeps as many tokens as lie before a row in its chunk.
    """
    tokens = attention_mask.bool()
    first = tokens.int().argmax(1)  # chunks of each sequence are counted from there
    starts = torch.maximum(first, left_out + (first - left_out) % size)[:, None]
    seen = tokens & (torch.arange(tokens.shape[1], device=tokens.device) >= starts)
    if bool((seen.any(1) & ~tokens.gather(1, starts)[:, 0]).any()):
        raise ValueError(
            f"attention_mask has padding where a chunk of {size} tokens begins, and the cache has left out {left_out} tokens "
            "before; give one that keeps all (past_key_values=DynamicCache()), or padding before or after the tokens"
        )
    return seen


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    """Yield the name of each function that a mask is composed of, and the size that it holds, such as that of a window."""
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    yield mask_function.__qualname__.partition(".")[0], next((held for held in cells if isinstance(held, int)), 0)
    for held in cells:
        for part in held if isinstance(held, tuple) else (held,):
            if callable(part):
                yield from _parts(part)


def _shown(mask_function: Callable[..., Any]) -> Pattern:
    """Return the pattern of a mask, apart from causality, padding and packed sequences."""
    sizes = {(OVERLAYS[name][0], size + OVERLAYS[name][1]) for name, size in _parts(mask_function) if name in OVERLAYS}
    if len(sizes) > 1:
        raise ValueError(f"the mask of the model has several windows, {sorted(sizes)}; give the pattern by register or convert")
    return known_pattern(*(sizes or {(FULL, 0)}).pop())


def _is_causal(mask_function: Callable[..., Any] | None, config: Any, options: dict[str, Any]) -> bool | None:
    """True if no row sees a later key, by the functions of the mask or, compiled, by the skips that transformers allows."""
    if torch.compiler.is_compiling():
        if getattr(config, "use_bidirectional_attention", False) is True:
            return False  # EmbeddingGemma asks for causal masks, and adds to them
        return "allow_is_bidirectional_skip" not in options if "allow_is_causal_skip" in options else None
    if mask_function is None:
        return None
    return {"bidirectional_mask_function", *OF_ENCODERS}.isdisjoint(name for name, _ in _parts(mask_function))


def _is_composed(mask_function: Callable[..., Any] | None) -> bool:
    """True if the mask hides more than causality does. Under `torch.compile` only a call shows what."""
    return mask_function is not None and mask_function.__name__ not in ("causal_mask_function", "bidirectional_mask_function")


def _may_be_packed(mask_function: Callable[..., Any] | None) -> bool:
    if mask_function is None or torch.compiler.is_compiling():
        return _is_composed(mask_function)
    return "packed_sequence_mask_function" in dict(_parts(mask_function))


def _sees(mask_function: Any, batch: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Return a mask, bool `(batch, n)`, of the `rows` `(n,)` that see the key at their place in `keys` `(n,)`."""
    seen: Tensor = mask_function(torch.arange(batch, device=rows.device)[:, None], 0, rows[None], keys[None])
    return seen.expand(batch, rows.shape[0])  # len() would be a constant of torch.export
