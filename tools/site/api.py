"""The reference of docs/api.md: every public name in its group, and which options go together."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import dilkit
from dilkit.backend import Backend
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.site.picks import own_backends
from dilkit.tools.site.support import CALLS

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
"""The names of `dilkit`, by what they are for."""
FLAGS = {"bias": "biases", "softcap": "softcap", "dropout": "dropout", "packed": "varlen", "cache of all keys": "kv_cache"}
FLAGS |= {"ranks": ""}
"""What calls may be asked for, and the limit of a backend that says whether it can; ranks use any backend."""


def grouped_reference(root: Path) -> str:
    """The names of `dilkit` under the headings of their groups. Raises ValueError for a name that is in none, or in two."""
    placed = [name for names in GROUPS.values() for name in names]
    if sorted(placed) != sorted({*dilkit.__all__} - {"__version__"}):
        odd = {*placed} ^ ({*dilkit.__all__} - {"__version__"})
        raise ValueError(f"names={sorted(odd)}: each public name has its place in one group of tools/site/api.py")
    return "\n\n".join(f"## {title}\n\n{_entries(dilkit, names)}" for title, names in GROUPS.items())


def reference(root: Path, package: ModuleType) -> str:
    """The names of a package that `dilkit` has not too."""
    return _entries(package, sorted(set(package.__all__) - set(dilkit.__all__), key=str.lower))


def _entries(package: ModuleType, names: tuple[str, ...] | list[str]) -> str:
    """For the site's builder to put signature and docstring there."""
    return "\n\n".join(f"::: {getattr(package, name).__module__}.{name}" for name in names)


def composition_table(root: Path) -> str:
    """Which backends compute two options in one call; "no call" where none takes both."""
    backends = own_backends()
    rows = [("with", *FLAGS)]
    rows += [(f"**{one}**", *(_both(one, other, backends) for other in FLAGS)) for one in FLAGS]
    return rows_markdown(rows)


def _both(one: str, other: str, backends: list[Backend]) -> str:
    if not any(_takes(name, one) and _takes(name, other) for name in CALLS):
        return "no call"
    able = [b.name for b in backends if all(not FLAGS[x] or getattr(b.limits, FLAGS[x]) for x in (one, other))]
    return "all" if len(able) == len(backends) else ", ".join(f"`{name}`" for name in able)


def _takes(name: str, option: str) -> bool:
    """Whether a call is of this kind, or has this option."""
    of_kind = {"packed": "varlen" in name, "cache of all keys": "kvcache" in name, "ranks": name.startswith("comm.")}
    options = inspect.signature(CALLS[name]).parameters
    return of_kind[option] if option in of_kind else {"dropout": "dropout_p"}.get(option, option) in options
