"""Ranks compare their arguments before a call, so that a mistake on one of them is an error on all of them, and not a hang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from dilkit.comm.transports.base import Comm
from dilkit.comm.transports.errors import PlanMismatch, ranks_text

_LONGEST = 128
_ERROR, _STEP = "error", "step"


def agree_on(
    comm: Comm, facts: Callable[[], dict[str, Any]], step: str, may_differ: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Return the facts of all ranks, by rank, of which only those named in `may_differ` differ. Ranks may share one dict.

    Raises `PlanMismatch` on all ranks where they differ in `step` or in a fact. An error of `facts()` is raised where it
    happened, and its text as `PlanMismatch` on the others.
    """
    failure: Exception | None = None
    try:
        own_facts = facts()
    except Exception as error:
        failure, own_facts = error, {_ERROR: f"{type(error).__name__}: {error}"}
    named = {_STEP: step, **own_facts}
    for name, value in named.items():
        if isinstance(value, str) and not (len(value) <= _LONGEST and value.isascii()):
            named[name] = _short(value)
    record = json.dumps(named, ensure_ascii=False).encode()
    records, step = comm.share(record, step), f"{step}{comm.along}"
    if failure is not None:
        raise failure
    if records.count(record) == len(records):  # as in nearly every call
        return [_read(record, 0, step)] * len(records)
    all_facts = [_read(other, rank, step) for rank, other in enumerate(records)]
    _compare(_STEP, [other[_STEP] for other in all_facts], step)
    if failed := [rank for rank, other in enumerate(all_facts) if _ERROR in other]:
        raise PlanMismatch(f"{step}: on rank {failed[0]}: {all_facts[failed[0]][_ERROR]}", failed, step)
    for rank, other in enumerate(all_facts):
        if not other.keys() >= {*may_differ}:
            raise _unreadable(rank, step)
    for name in own_facts:  # in one order on all ranks: all name the same fact
        if name not in may_differ:
            _compare(name, [other.get(name) for other in all_facts], step)
    return all_facts


def _read(record: bytes, rank: int, step: str) -> dict[str, Any]:
    try:
        facts = json.loads(record)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or _STEP not in facts:
        raise _unreadable(rank, step)
    return facts


def _unreadable(rank: int, step: str) -> PlanMismatch:
    return PlanMismatch(f"{step}: the facts of rank {rank} cannot be read; do all ranks run the same version?", [rank], step)


def _compare(name: str, values: list[Any], step: str) -> None:
    common = max(values, key=values.count)
    if odd := [rank for rank, value in enumerate(values) if [value] != [common]]:  # in lists NaN equals itself, as json reads it
        value, several = values[odd[0]], len(odd) > 1
        if name == _STEP:
            what = f"{'are' if several else 'is'} at {value!r}, the others at {common!r}"
            way_out = "all ranks must make the same calls in the same order"
        else:
            what = f"{'have' if several else 'has'} {name}={value!r}, the others {common!r}"
            way_out = "all ranks must pass the same"
        raise PlanMismatch(f"{step}: {ranks_text(odd)} {what}; {way_out}", odd, step)


def _short(value: str) -> str:
    """Shorten a long text to its beginning and a digest: shared records hold few bytes."""
    text = value.encode("utf-8", "backslashreplace")
    if len(text) <= _LONGEST:
        return text.decode()
    return f"{text[:_LONGEST].decode('utf-8', 'ignore')}... ({hashlib.sha256(text).hexdigest()[:16]})"
