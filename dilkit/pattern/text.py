"""A pattern as text: for people, as the call that makes it, and with all of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dilkit.pattern.pattern import Pattern

_DEFAULTS = {"offset": "modulo", "overlap": "count", "heads": None, "head_shard": None, "tail": "exact"}


def description(pattern: Pattern) -> str:
    """One line for each branch, and one for the rules."""
    offset = {"modulo": "head mod rate", "block": "head // ceil(heads / rate)"}[pattern.offset]
    overlap = {"count": "a key seen by m branches counts m times", "once": "a key seen by several branches counts once"}
    lines = [f"branch {i}: {branch}" for i, branch in enumerate(pattern.branches)]
    shard = "" if pattern.head_shard is None else "; the heads from {} on, of {}".format(*pattern.head_shard)
    tail = {"exact": "", "zeros": "; tail: zero keys in the place of missing ones"}[pattern.tail]
    return "\n".join([*lines, f"offset: {offset}{shard}; overlap: {overlap[pattern.overlap]}{tail}"])


def short_text(pattern: Pattern) -> str:
    """The call that makes the pattern, without the arguments that are as by default."""
    changed = {name: getattr(pattern, name) for name, default in _DEFAULTS.items() if getattr(pattern, name) != default}
    if pattern.only_segments:
        return f"Pattern({_listed(str([*pattern.segment_lengths]), str([*pattern.dilation_rates]), **changed)})"
    changed.pop("heads", None)  # which are arguments of the branches
    return f"Pattern.of({_listed(*(branch.call() for branch in pattern.branches), **changed)})"


def full_text(pattern: Pattern) -> str:
    """The call with all of the arguments."""
    rules = {name: getattr(pattern, name) for name in _DEFAULTS}
    if pattern.only_segments:
        lists = dict(segment_lengths=pattern.segment_lengths, dilation_rates=pattern.dilation_rates)
        return f"Pattern({_listed(**lists, **rules)})"
    del rules["heads"]
    return f"Pattern.of({_listed(*map(repr, pattern.branches), **rules)})"


def _listed(*arguments: str, **named: object) -> str:
    return ", ".join([*arguments, *(f"{name}={value!r}" for name, value in named.items())])
