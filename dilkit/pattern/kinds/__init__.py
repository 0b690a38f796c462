"""The kinds of branches of a pattern, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dilkit.checks import shown
from dilkit.pattern.checks import PatternError, check_number_of_branches
from dilkit.pattern.kinds.block_layout import BlockLayout
from dilkit.pattern.kinds.block_sparse import BlockSparse
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.kinds.dilated_segment import DilatedSegment
from dilkit.pattern.kinds.documents import Documents
from dilkit.pattern.kinds.global_tokens import GlobalTokens
from dilkit.pattern.kinds.intervals import Intervals, RowIntervals
from dilkit.pattern.kinds.neighborhood import Neighborhood
from dilkit.pattern.kinds.prefix import Prefix
from dilkit.pattern.kinds.registry import KINDS, broken_kinds, kind_class, known_kinds, register_kind
from dilkit.pattern.kinds.sliding_window import SlidingWindow
from dilkit.pattern.kinds.strided import Strided

__all__ = [
    "KINDS",
    "BlockLayout",
    "BlockSparse",
    "Branch",
    "DilatedSegment",
    "Documents",
    "GlobalTokens",
    "Intervals",
    "Neighborhood",
    "Prefix",
    "RowIntervals",
    "SlidingWindow",
    "Strided",
    "branch_of",
    "broken_kinds",
    "check_branches",
    "kind_class",
    "known_kinds",
    "register_kind",
]


def check_branches(branches: tuple[Branch, ...]) -> None:
    """Raise TypeError or `PatternError` unless these are branches, at least one."""
    if not branches:
        raise PatternError("branches is empty; a pattern has at least one branch, such as SlidingWindow(512)")
    check_number_of_branches("branches", len(branches))
    for i, branch in enumerate(branches):
        if not isinstance(branch, Branch):
            name = type(branch).__name__
            raise TypeError(f"branches[{i}]={shown(branch)} is a {name}; a branch is needed, such as SlidingWindow(512)")
        if KINDS.get(branch.kind) is not type(branch) and kind_class(branch.kind) is not type(branch):
            name = type(branch).__name__
            hint = f"dilkit.register_kind({name}) makes it so"
            raise TypeError(f"branches[{i}]={shown(branch)} is of a kind that is not known; {hint}")
    if sum(branch.is_given_by_call for branch in branches) > 1:
        raise PatternError("branches has two without a layout of their own; a call gives one block_layout, for one branch")


def branch_of(values: Any) -> Branch:
    """Return the branch that `Branch.to_fields` wrote. Raises `PatternError` or TypeError for anything else."""
    kind = values.get("kind") if isinstance(values, Mapping) else None
    cls = kind_class(kind) if isinstance(kind, str) else None
    if cls is None:
        raise PatternError(
            f"branch {shown(values)} is of no known kind; an object with kind is needed: {', '.join(known_kinds())}, or one of "
            "your own, dilkit.register_kind(...)"
        )
    arguments = {name: value for name, value in values.items() if name != "kind"}
    if isinstance(arguments.get("heads"), list):  # JSON has no pairs
        arguments["heads"] = tuple(arguments["heads"])
    known = cls.arguments()
    if unknown := arguments.keys() - known.keys():
        raise PatternError(f"branch {kind} has {', '.join(map(shown, sorted(unknown)))}; its fields are {', '.join(known)}")
    if missing := [name for name, needed in known.items() if needed and name not in arguments]:
        raise PatternError(f"branch {kind} has no {' and no '.join(missing)}; its fields are {', '.join(known)}")
    return cls.from_fields(arguments)
