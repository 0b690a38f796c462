"""The fields of a pattern as its JSON text has them."""

from __future__ import annotations

import json
from typing import Any

from dilkit.pattern.checks import PatternError

FIELDS = ("segment_lengths", "dilation_rates", "offset", "overlap", "heads", "head_shard", "tail")


def fields_of(text: str) -> dict[str, Any]:
    """The arguments of the pattern that `Pattern.to_json` wrote as `text`. Raises `PatternError` for any other text."""
    shown = repr(text if len(text) <= 200 else f"{text[:200]}...")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PatternError(f"text={shown} is not JSON ({error}); write it with Pattern.to_json()") from None
    if not isinstance(fields, dict):
        raise PatternError(f"text={shown} is not a JSON object; write it with Pattern.to_json()")
    if unknown := fields.keys() - FIELDS:
        raise PatternError(f"text={shown} has {', '.join(map(repr, sorted(unknown)))}; a pattern has {', '.join(FIELDS)}")
    if missing := [name for name in FIELDS[:2] if name not in fields]:
        raise PatternError(f"text={shown} has no {' and no '.join(missing)}; write it with Pattern.to_json()")
    return fields
