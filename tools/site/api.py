"""The reference of docs/api.md, and tables of calls, forms, commands, variables and peers: what users and backends name."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import dilkit
from dilkit import comm
from dilkit.environment import VARIABLES
from dilkit.pattern.lowering import Band, CutGrid, Form, Global, Grid, Runs, Segments
from dilkit.tools import cli
from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.report.markdown import rows_markdown

GROUPS = {
    "Attend": ("dilated_attention", "attention_rows", "attention_mass"),
    "Patterns": (
        *("Pattern", "DilatedSegment", "SlidingWindow", "GlobalTokens", "Strided", "BlockSparse", "Neighborhood"),
        *("Documents", "Prefix", "Intervals", "PatternError"),
    ),
    "Biases": ("Alibi", "alibi_slopes", "CoordinateAlibi", "RelativeTable", "t5_buckets", "GridTable"),
    "Modules": ("DilatedAttention", "MultiheadDilatedAttention"),
    "Packed sequences and decoding": (
        *("dilated_attention_varlen", "dilated_attention_with_kvcache", "DilatedCache", "PagedCache", "PoolFullError"),
    ),
    "Token orders": (*("order", "TokenOrder", "ordered_dilated_attention", "sort_points", "locality_report", "LocalityReport"),),
    "Who computes": ("explain", "use_backend", "list_backends", "Problem", "Device", "NoBackendError"),
    "Extend": ("Backend", "Limits", "Inputs", "Refusal", "register_backend", "unregister_backend", "Branch", "register_kind"),
}
"""Names of `dilkit` by purpose."""
CALLS: dict[str, Callable[..., Any]] = {
    "dilated_attention": dilkit.dilated_attention,
    "dilated_attention_varlen": dilkit.dilated_attention_varlen,
    "dilated_attention_with_kvcache": dilkit.dilated_attention_with_kvcache,
    "DilatedCache.attend": dilkit.DilatedCache.attend,
    "PagedCache.attend": dilkit.PagedCache.attend,
    "ordered_dilated_attention": dilkit.ordered_dilated_attention,
    "comm.ring_dilated_attention": comm.ring_dilated_attention,
    "comm.ring_dilated_attention_varlen": comm.ring_dilated_attention_varlen,
}
OPTIONS = ("is_causal", "key_padding_mask", "dropout_p", "sink", "bias", "softcap", "return_lse")


def grouped_reference(root: Path) -> str:
    """Return the names of `dilkit` under the headings of their groups. Raises ValueError for a name in no group, or in two."""
    placed, public = [name for names in GROUPS.values() for name in names], {*dilkit.__all__} - {"__version__"}
    if sorted(placed) != sorted(public):
        raise ValueError(f"names={sorted({*placed} ^ public)}: each public name has its place in one group of tools/site/api.py")
    return "\n\n".join(f"## {title}\n\n{_entries(dilkit, names)}" for title, names in GROUPS.items())


def reference(root: Path, package: ModuleType) -> str:
    """Return the names of a package that are not in `dilkit` too."""
    return _entries(package, sorted(set(package.__all__) - set(dilkit.__all__), key=str.lower))


def _entries(package: ModuleType, names: Sequence[str]) -> str:
    """Return a directive for each name: the site's builder puts signature and docstring there."""
    return "\n\n".join(f"::: {getattr(package, name).__module__}.{name}" for name in names)


def call_table(root: Path) -> str:
    """Return a row for each call, with the options that it has."""
    rows = [("call", *(f"`{name}=`" for name in OPTIONS))]
    for name, call in CALLS.items():
        known = inspect.signature(call).parameters
        rows.append((f"`{name}`", *("yes" if option in known else "no" for option in OPTIONS)))
    return rows_markdown(rows)


def form_table(root: Path) -> str:
    """Return a row for each form, with the fields that it has beside those of all, and their types."""
    rows: list[tuple[str, ...]] = [("form", "what it shows", "fields")]
    common = {field.name for field in fields(Form)}
    for form in (Segments, Band, Global, Runs, Grid, CutGrid, Form):
        listed = (field for field in fields(form) if form is Form or field.name not in common)
        typed = ", ".join(f"`{field.name}: {field.type}`".replace("|", "or") for field in listed)
        shown = " ".join(inspect.cleandoc(form.__doc__ or "").split("\n\n")[0].split())
        rows.append(("every form" if form is Form else f"`{form.__name__}`", shown, typed))
    return rows_markdown(rows)


def peer_table(root: Path) -> str:
    """Return a row for each peer of `dilkit bench`."""
    peers = ((f"`{p.name}`", p.summary, p.computes) for p in BASELINES.values())
    return rows_markdown([("peer", "what it is", "what it computes"), *peers])


def environment_table(root: Path) -> str:
    """Return a row for each environment variable."""
    return rows_markdown([("variable", "meaning", "when unset"), *((f"`{v.name}`", v.meaning, v.default) for v in VARIABLES)])


def command_help(root: Path) -> str:
    """Return the help texts of all commands."""
    parts = []
    for command in ((), *((name,) for name in cli.COMMANDS)):
        shown = io.StringIO()
        with mock.patch.dict(os.environ, {"COLUMNS": "110", "NO_COLOR": "1"}), contextlib.redirect_stdout(shown):
            cli.main([*command, "--help"])
        title = " ".join(("dilkit", *command))
        parts.append(f"## {title}\n\n```text\n{shown.getvalue().strip()}\n```\n")
    return "\n".join(parts)
