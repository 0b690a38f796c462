"""A pattern as text: for people, as the call that makes it, with all of its arguments, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dilkit.checks import shown
from dilkit.pattern.checks import PatternError, check_number_of_branches
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.kinds.registry import branch_of

if TYPE_CHECKING:
    from dilkit.pattern.pattern import Pattern

LISTS = ("segment_lengths", "dilation_rates", "heads")
RULES = ("offset", "overlap", "head_shard", "tail")
_DEFAULTS = {"offset": "modulo", "overlap": "count", "heads": None, "head_shard": None, "tail": "exact"}


def description(pattern: Pattern) -> str:
    """Describe each branch in a line, and the rules in one more."""
    offset = {"modulo": "head mod rate", "block": "head // ceil(heads / rate)"}[pattern.offset]
    overlap = {"count": "a key seen by m branches counts m times", "once": "a key seen by several branches counts once"}
    lines = [f"branch {i}: {branch}" for i, branch in enumerate(pattern.branches)]
    shard = "" if pattern.head_shard is None else "; the heads from {} on, of {}".format(*pattern.head_shard)
    tail = {"exact": "", "zeros": "; tail: zero keys in the place of missing ones"}[pattern.tail]
    return "\n".join([*lines, f"offset: {offset}{shard}; overlap: {overlap[pattern.overlap]}{tail}"])


def text_of(pattern: Pattern, full: bool = False) -> str:
    """Return the call that makes the pattern, without arguments that have their default unless `full`."""
    values = {name: getattr(pattern, name) for name in _DEFAULTS}
    rules = [f"{name}={value!r}" for name, value in values.items() if full or value != _DEFAULTS[name]]
    if pattern.only_segments:
        lists = dict(segment_lengths=pattern.segment_lengths, dilation_rates=pattern.dilation_rates)
        listed = [f"{name}={value}" if full else str([*value]) for name, value in lists.items()]
        return f"Pattern({', '.join(listed + rules)})"
    rules = [rule for rule in rules if not rule.startswith("heads=")]  # which are arguments of the branches
    branches = [repr(branch) if full else branch.call() for branch in pattern.branches]
    return f"Pattern.of({', '.join(branches + rules)})"


def json_of(values: Mapping[str, Any], branches: Sequence[Branch]) -> str:
    """Return the text of a pattern: by its lists if of segments alone, as patterns have always been written; else by branches."""
    if "segment_lengths" not in values:
        values = dict(branches=[branch.to_fields() for branch in branches], **{name: values[name] for name in RULES})
    return json.dumps(values, separators=(",", ":"))


def fields_of(text: str) -> dict[str, Any]:
    """Return the arguments of `Pattern`, or of `Pattern.of` if `branches` is among them, that `Pattern.to_json` wrote as `text`.

    Raises `PatternError` for any other text.
    """
    said, way = shown(text), "write it with Pattern.to_json()"
    try:
        fields = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise PatternError(f"text={said} is not JSON ({error}); {way}") from None
    if not isinstance(fields, dict):
        raise PatternError(f"text={said} is not a JSON object; {way}")
    by_branch = "branches" in fields
    known = ("branches", *RULES) if by_branch else (*LISTS[:2], RULES[0], RULES[1], LISTS[2], *RULES[2:])
    if unknown := fields.keys() - known:
        raise PatternError(f"text={said} has {', '.join(map(shown, sorted(unknown)))}; a pattern has {', '.join(known)}")
    if missing := [name for name in LISTS[:2] if name not in fields and not by_branch]:
        raise PatternError(f"text={said} has no {' and no '.join(missing)}; {way}")
    if isinstance(fields.get("heads"), list):
        fields["heads"] = [tuple(value) if isinstance(value, list) else value for value in fields["heads"]]  # JSON has no pairs
    if by_branch:
        if not isinstance(fields["branches"], list):
            raise PatternError(f"text={said} has branches that are no list; {way}")
        check_number_of_branches("branches", len(fields["branches"]))
        fields["branches"] = [branch_of(values) for values in fields["branches"]]
    return fields


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError for a field that is there twice: Python would take the last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return fields
