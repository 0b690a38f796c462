"""Tables of what backends can of what calls may ask for, which options calls have, and the fields of forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dilkit import (
    BlockSparse,
    DilatedCache,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    PagedCache,
    Pattern,
    Prefix,
    SlidingWindow,
    Strided,
    comm,
    dilated_attention,
    dilated_attention_varlen,
    dilated_attention_with_kvcache,
    ordered_dilated_attention,
)
from dilkit.backend import COUNT, Backend
from dilkit.pattern.lowering import FORMS, Band, CutGrid, Form, Global, Grid, Runs, Segments, lower
from dilkit.tools.report.markdown import rows_markdown

FEATURES = {"packed sequences": "varlen", "cache of all keys": "kv_cache", "dropout": "dropout", "sinks": None}
FEATURES |= {"softcap": "softcap", "biases": "biases"}
"""What a call may ask for, and the limit that says whether a backend can; None: the operator adds it to any backend's results."""
CALLS: dict[str, Callable[..., Any]] = {
    "dilated_attention": dilated_attention,
    "dilated_attention_varlen": dilated_attention_varlen,
    "dilated_attention_with_kvcache": dilated_attention_with_kvcache,
    "DilatedCache.attend": DilatedCache.attend,
    "PagedCache.attend": PagedCache.attend,
    "ordered_dilated_attention": ordered_dilated_attention,
    "comm.ring_dilated_attention": comm.ring_dilated_attention,
    "comm.ring_dilated_attention_varlen": comm.ring_dilated_attention_varlen,
}
EXAMPLES = (
    DilatedSegment(1, 1),
    SlidingWindow(1),
    GlobalTokens(1),
    Strided(1),
    BlockSparse([[True]], 1),
    Neighborhood(1, 1),
    Documents([1]),
    Prefix(1),
    Intervals([0], [0]),
)
"""A branch of each kind."""

OPTIONS = ("is_causal", "key_padding_mask", "dropout_p", "sink", "bias", "softcap", "return_lse")


def support_table(backends: Sequence[Backend]) -> str:
    """One row a backend: whether it can compute what a call may ask for."""
    rows = [("backend", *FEATURES, "kinds of branches")]
    for backend in backends:
        can = (flag is None or getattr(backend.limits, flag) for flag in FEATURES.values())
        forms = backend.limits.forms or frozenset({Segments.name})
        forms = FORMS if COUNT in forms else forms
        kinds = (f"`{type(branch).__name__}`" for branch in EXAMPLES if lower(Pattern.of(branch), 1, 1).names <= forms)
        rows.append((f"`{backend.name}`", *map(_word, can), ", ".join(kinds)))
    return rows_markdown(rows)


def call_table(root: Path) -> str:
    """One row a call: which options it has."""
    rows = [("call", *(f"`{name}=`" for name in OPTIONS))]
    for name, call in CALLS.items():
        known = inspect.signature(call).parameters
        rows.append((f"`{name}`", *(_word(option in known) for option in OPTIONS)))
    return rows_markdown(rows)


def form_table(root: Path) -> str:
    """One row a form: what it shows, and its fields with their types."""
    rows: list[tuple[str, ...]] = [("form", "what it shows", "fields")]
    of_all = {field.name for field in fields(Form)}
    for form in (Segments, Band, Global, Runs, Grid, CutGrid, Form):
        own = (field for field in fields(form) if form is Form or field.name not in of_all)
        typed = ", ".join(f"`{field.name}: {field.type}`".replace("|", "or") for field in own)
        shown = " ".join(inspect.cleandoc(form.__doc__ or "").split("\n\n")[0].split())
        rows.append(("every form" if form is Form else f"`{form.__name__}`", shown, typed))
    return rows_markdown(rows)


def _word(can: object) -> str:
    return "yes" if can else "no"
