"""The classes of branches by the names of their kinds: those of dilkit, of packages, and of this process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dilkit import plan
from dilkit.checks import shown, visible
from dilkit.pattern.checks import PatternError, check_number_of_branches
from dilkit.pattern.kinds.bands import DilatedSegment, SlidingWindow, Strided
from dilkit.pattern.kinds.block_sparse import BlockSparse
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.kinds.global_tokens import GlobalTokens
from dilkit.pattern.kinds.intervals import Documents, Intervals, Prefix
from dilkit.pattern.kinds.neighborhood import Neighborhood

GROUP = "dilkit.kinds"
"""The entry points by which packages announce kinds: name = the kind, value = the class."""

_OWN: tuple[type[Branch], ...] = (
    DilatedSegment,
    SlidingWindow,
    GlobalTokens,
    Strided,
    BlockSparse,
    Neighborhood,
    Documents,
    Prefix,
    Intervals,
)
KINDS: dict[str, type[Branch]] = {cls.kind: cls for cls in _OWN}
"""The classes that are known by now, by the names of their kinds, as JSON has them."""

READ_WITH_CLASSES: list[Callable[[], None]] = []
"""Functions that empty the caches of values read with these classes, beside the pattern cache."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def register_kind(cls: type[Branch]) -> type[Branch]:
    """Make a kind of branch known in this process: patterns of it are read from JSON, and called. Returns the class.

    A kind is a frozen dataclass, a subclass of `Branch`, with the name `kind`, a last field `heads`, and `sees`, which is
    evaluated for every pair of up to 32,768 tokens; a kind that defines `forms` and `pairs` says it by formula, for sequences of
    any length. A package declares an entry point in the group `dilkit.kinds` instead.

    Raises TypeError for a class that is none of these, and `PatternError` for a kind that another class has.

    Example:

        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> import dilkit
        >>> @dilkit.register_kind
        ... @dataclass(frozen=True)
        ... class Mirror(dilkit.Branch):
        ...     '''Every token sees the one that is as far from the end as it is from the start.'''
        ...     kind: ClassVar[str] = "mirror"
        ...     tokens: int
        ...     heads: tuple[int, int] | None = None
        ...     def sees(self, rows, keys, heads):
        ...         return (rows[:, None] + keys == self.tokens - 1)[None]
        >>> dilkit.Pattern.of(Mirror(3)).count(3, heads=1)[0].tolist()
        [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    """
    _check(cls)
    known = KINDS.get(cls.kind)
    if known is None:
        with suppress(PatternError):  # a package that announces it as well, such as the one whose import comes here, or is broken
            known = kind_class(cls.kind)
    if known is not None and known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise PatternError(f"kind={cls.kind!r} is that of {known.__module__}.{known.__qualname__}; give yours another name")
    if known is not cls:
        KINDS[cls.kind] = cls
        if known is not None:  # as where a cell of a notebook is run again: nothing read with the old class is kept
            plan.cache_clear()
            for forget in READ_WITH_CLASSES:
                forget()
    return cls


def kind_class(kind: str) -> type[Branch] | None:
    """Return a kind's class, loaded if a package announces it, or None. Raises `PatternError` if loading fails."""
    if kind not in KINDS and (entries := entry_points(group=GROUP, name=kind)):
        values = sorted({entry.value for entry in entries})
        if len(values) > 1:
            raise PatternError(f"kind {kind!r} is announced as {' and as '.join(values)}; uninstall all packages but one")
        loaded = _loaded(kind, next(iter(entries)))
        KINDS[kind] = loaded
    return KINDS.get(kind)


def _loaded(kind: str, entry: EntryPoint) -> type[Branch]:
    """Load the class of an entry point: all that its foreign code raises, even SystemExit, becomes a `PatternError`."""
    try:
        cls: type[Branch] = entry.load()
        _check(cls)
        if cls.kind == kind:
            return cls
        problem = f"it is the class {shown(cls)}, whose kind is {cls.kind!r}"
    except (KeyboardInterrupt, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        problem = visible(f"{type(error).__name__}: {error}")
    raise PatternError(f"kind {kind!r} of {entry.value} is broken: {problem}; mend or uninstall its package")


def broken_kinds() -> dict[str, str]:
    """Return the kinds that packages announce but that cannot be loaded, each with the reason."""
    broken = {}
    for kind in known_kinds():
        try:
            kind_class(kind)
        except PatternError as error:
            broken[kind] = str(error)
    return broken


def known_kinds() -> tuple[str, ...]:
    """Return the names of all kinds, those that packages announce as well."""
    return (*KINDS, *sorted({entry.name for entry in entry_points(group=GROUP)} - KINDS.keys()))


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
        raise PatternError("branches has two that are given by each call, block_sparse or intervals; at most one is possible")


def branch_of(values: Any) -> Branch:
    """Return the branch that `Branch.to_fields` wrote. Raises `PatternError` or TypeError for anything else."""
    kind = values.get("kind") if isinstance(values, Mapping) else None
    cls = kind_class(kind) if isinstance(kind, str) else None
    if cls is None:
        needed = f"{', '.join(known_kinds())}, or one of dilkit.register_kind(...)"
        raise PatternError(f"branch {shown(values)} is no object of a known kind: {needed}")
    arguments = {name: value for name, value in values.items() if name != "kind"}
    if isinstance(arguments.get("heads"), list):  # JSON has no pairs
        arguments["heads"] = tuple(arguments["heads"])
    known = cls.arguments()
    if unknown := arguments.keys() - known.keys():
        raise PatternError(f"branch {kind} has {', '.join(map(shown, sorted(unknown)))}; its fields are {', '.join(known)}")
    if missing := [name for name, needed in known.items() if needed and name not in arguments]:
        raise PatternError(f"branch {kind} has no {' and no '.join(missing)}; its fields are {', '.join(known)}")
    return cls.from_fields(arguments)


def _check(cls: type[Branch]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Branch)):
        raise TypeError(f"cls={shown(cls)}: a subclass of dilkit.Branch is needed")
    name = f"{cls.__module__}.{cls.__qualname__}"
    if not isinstance(kind := getattr(cls, "kind", None), str) or not _NAME.fullmatch(kind):
        raise TypeError(f"{name}.kind={shown(kind)}: a name in lower case is needed, such as 'sliding_window'")
    if "__dataclass_fields__" not in vars(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{name} is no frozen dataclass, and patterns are hashed; write @dataclass(frozen=True)")
    if [field.name for field in dataclasses.fields(cls)][-1:] != ["heads"]:
        raise TypeError(f"{name} has no last field `heads: tuple[int, int] | None = None`, the query heads that it serves")
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise TypeError(f"{name} has no {', '.join(missing)}")
