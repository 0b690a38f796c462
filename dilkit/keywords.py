"""Keywords that other libraries know: where a function of dilkit lacks one, its error names the way that there is here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


class Way(NamedTuple):
    """What to write in place of a keyword, in functions that have the argument `where`; anywhere if that is empty."""

    where: str
    text: str


_PATTERN = "the pattern says which token sees which (docs/recipes.md)"
_SEES = (
    Way("key_padding_mask", f"{_PATTERN}, and key_padding_mask= which keys nobody sees"),
    Way("query", f"{_PATTERN}; keys that nobody sees are left out of the call"),
    Way("", f"{_PATTERN}, and key_padding_mask= of each call which keys nobody sees"),
)
_CAUSAL = (
    Way("is_causal", "write is_causal="),
    Way("query", "the call is always causal; leave it out"),
    Way("", "say it in each call, is_causal="),
)
_SCALE = Way("scale", "write scale="), Way("", "the scale is the module's: DilatedAttention(pattern, scale=...)")
_WINDOW = Way("", "a window is a branch of the pattern: Pattern.of(SlidingWindow(...)), or Pattern.mistral(window)")
_GRID = Way("", "a neighborhood is a branch of the pattern: Pattern.natten(grid, kernel_size)")
_PACKED = (
    Way("cu_seqlens", "write cu_seqlens=, and max_seqlen= where there is one: queries and keys are of the same sequences"),
    Way("", "packed sequences are computed by dilkit.dilated_attention_varlen(..., cu_seqlens=...)"),
)
_DROPOUT = (
    Way("dropout_p", "write dropout_p="),
    Way("dropout", "write dropout="),
    Way("query", "nothing is dropped in this call; leave it out"),
    Way("", "say it in each call, dropout_p="),
)
_WEIGHTS = Way("", "weights are not returned; dilkit.attention_rows and dilkit.attention_mass give them")
_SINK = (
    Way("sink", "write sink="),
    Way("query", "sinks are the module's: MultiheadDilatedAttention(..., sink=True)"),
    Way("", "say it in each call, sink="),
)
_CAPPED = (
    Way("softcap", "write softcap="),
    Way("", "the softcap is the inner attention's: DilatedAttention(pattern, softcap=...)"),
)
_RANKS = Way("comm", "write comm=, as in TorchComm(group)"), Way("", "over ranks: dilkit.comm.ring_dilated_attention(..., comm=)")
_INNER = Way("", "it is the inner attention's: attention=DilatedAttention(pattern, ...)")
WAYS: dict[str, tuple[Way, ...]] = {
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "block_mask", "mask_mod", "key_padding_mask"), _SEES),
    "attn_bias": (
        Way("is_causal", "bias= is a value of few numbers, as dilkit.Alibi, not a tensor of all pairs (docs/recipes.md)"),
    ),
    **dict.fromkeys(("causal", "is_causal"), _CAUSAL),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scale"), _SCALE),
    **dict.fromkeys(("window_size", "sliding_window", "window"), (_WINDOW,)),
    **dict.fromkeys(("kernel_size", "dilation"), (_GRID,)),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k"), _PACKED),
    **dict.fromkeys(("dropout", "dropout_p", "p"), _DROPOUT),
    **dict.fromkeys(("return_attn_probs", "need_weights", "return_weights"), (_WEIGHTS,)),
    **dict.fromkeys(("sinks", "sink", "s_aux", "learnable_sink"), _SINK),
    **dict.fromkeys(("softcap", "logits_soft_cap", "logit_softcapping"), _CAPPED),
    **dict.fromkeys(("group", "process_group", "cp_group"), _RANKS),
    **dict.fromkeys(("pattern", "backend"), (_INNER,)),
    "alibi_slopes": (
        Way("score_bias", "write score_bias=dilkit.Alibi(slopes)"),
        Way("embed_dim", "it is the inner attention's: attention=DilatedAttention(pattern, bias=dilkit.Alibi(slopes))"),
        Way("bias", "write bias=dilkit.Alibi(slopes)"),
    ),
    "score_mod": (Way("", "scores are changed by bias= and softcap= alone (docs/recipes.md)"),),
    "enable_gqa": (Way("", "leave it out: key and value may have fewer heads than query"),),
    "deterministic": (Way("", "leave it out; which backends give the same bits in every run is in docs/backends.md"),),
}
"""What to do without a keyword; the first way whose argument the function has is named."""


def refusing(function: F) -> F:
    """`function`, whose error for a keyword that it does not have names the way, or the nearest of those that it has."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is None:
                raise
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{name} takes no {unknown}=: {_way(unknown, known)}") from None

    return cast(F, checked)


def _way(unknown: str, known: Any) -> str:
    """What stands in the place of a keyword that is not among those that are known."""
    named = (way.text for way in WAYS.get(unknown, ()) if way.where in ("", *known))
    near = (f"did you mean {name}?" for name in get_close_matches(unknown, known, 1))
    return next(named, None) or next(near, None) or f"it has {', '.join(name for name in known if name != 'self')}"
