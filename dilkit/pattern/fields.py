"""The fields of a pattern as its JSON text has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dilkit.checks import shown
from dilkit.pattern.checks import PatternError, check_number_of_branches
from dilkit.pattern.kinds import Branch, branch_of

LISTS = ("segment_lengths", "dilation_rates", "heads")
RULES = ("offset", "overlap", "head_shard", "tail")


def json_of(values: Mapping[str, Any], branches: Sequence[Branch]) -> str:
    """The text of a pattern: of segments alone by its lists, which is how patterns have always been written; else by branches."""
    if "segment_lengths" not in values:
        values = dict(branches=[branch.to_fields() for branch in branches], **{name: values[name] for name in RULES})
    return json.dumps(values, separators=(",", ":"))


def fields_of(text: str) -> dict[str, Any]:
    """The arguments of the pattern that `Pattern.to_json` wrote as `text`, of `Pattern.of` if there are branches among them.

    Raises `PatternError` for any other text.
    """
    said = shown(text)
    try:
        fields = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise PatternError(f"text={said} is not JSON ({error}); write it with Pattern.to_json()") from None
    if not isinstance(fields, dict):
        raise PatternError(f"text={said} is not a JSON object; write it with Pattern.to_json()")
    by_branch = "branches" in fields
    known = ("branches", *RULES) if by_branch else (*LISTS[:2], RULES[0], RULES[1], LISTS[2], *RULES[2:])
    if unknown := fields.keys() - known:
        raise PatternError(f"text={said} has {', '.join(map(shown, sorted(unknown)))}; a pattern has {', '.join(known)}")
    if missing := [name for name in LISTS[:2] if name not in fields and not by_branch]:
        raise PatternError(f"text={said} has no {' and no '.join(missing)}; write it with Pattern.to_json()")
    if isinstance(fields.get("heads"), list):
        fields["heads"] = [tuple(value) if isinstance(value, list) else value for value in fields["heads"]]  # JSON has no pairs
    if by_branch:
        if not isinstance(fields["branches"], list):
            raise PatternError(f"text={said} has branches that are no list; write it with Pattern.to_json()")
        check_number_of_branches("branches", len(fields["branches"]))
        fields["branches"] = [branch_of(values) for values in fields["branches"]]
    return fields


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a field that is there twice: Python would take the last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return fields
