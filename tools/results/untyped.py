"""The result file: one JSON object a run, holding everything a figure rests on. Every published figure is read out of one.

schema, kind          1, and which command's result it is ("bench", "overhead", ...)
command, date         the command line, and when it ended (UTC)
environment           device, threads, versions, git revision and whether there were changes beside it
...                   what the command adds: the problem, all samples, the check that passed before the timing
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dilkit.device import Device
from dilkit.problem import Problem
from dilkit.tools.console.text import visible
from dilkit.tools.results import strict_json
from dilkit.tools.results.decode import encode
from dilkit.tools.results.environment import environment as _environment
from dilkit.tools.results.environment import now as now
from dilkit.tools.results.environment import usable_cores as usable_cores
from dilkit.tools.results.file import ResultError as ResultError
from dilkit.tools.results.file import write_text as write_text

SCHEMA = 1
_COMMON = ("schema", "kind", "command", "date", "environment")


def new(kind: str, device: Device, **fields: Any) -> dict[str, Any]:
    """A result of this run: the fields that every result has, then `fields`."""
    program = Path(sys.argv[0]).name
    command = shlex.join(["dilkit" if program == "__main__.py" else program, *sys.argv[1:]])
    return dict(schema=SCHEMA, kind=kind, command=command, date=now(), environment=environment(device), **fields)


def environment(device: Device) -> dict[str, Any]:
    """The record of the environment as plain data."""
    found: dict[str, Any] = encode(_environment(device))
    return found


def describe_problem(problem: Problem) -> dict[str, Any]:
    """`problem` without its length and device, as plain data; "backward" says whether a call includes the backward pass."""
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "is_causal", "key_padding_mask", "scale")
    pattern = dict(text=str(problem.pattern), **json.loads(problem.pattern.to_json()))
    return dict(pattern=pattern, **{name: getattr(problem, name) for name in names}, backward=problem.requires_grad)


def save(result: dict[str, Any], path: Path) -> None:
    """Write `result` as JSON, whole or not at all: a reader never sees half a file. Raises ValueError for NaN or infinity."""
    write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def load(path: Path, kind: str | None = None, needs: tuple[str, ...] = ()) -> dict[str, Any]:
    """The result in `path`, with the fields that every result has and those in `needs`; its texts are one line each.

    Raises `ResultError` for a file that is truncated, foreign, of another schema or (where `kind` is given) another kind.
    """
    try:
        result = strict_json.read(path)
    except strict_json.NotStrict as error:
        raise ResultError(path, str(error)) from None
    if not isinstance(result, dict) or "schema" not in result or not isinstance(result.get("kind"), str):
        raise ResultError(path, "no result of dilkit, which has a schema and a kind; one is written by `dilkit bench`")
    if type(result["schema"]) is not int or result["schema"] != SCHEMA:
        shown = visible(repr(result["schema"]), 20)
        raise ResultError(path, f"schema {shown}; this dilkit reads schema {SCHEMA}, run the command again")
    if kind is not None and result["kind"] != kind:
        raise ResultError(path, f"a result of kind {visible(result['kind'], 40)!r}; {kind!r} is needed")
    if missing := [name for name in (*_COMMON, *needs) if name not in result]:
        raise ResultError(path, f"{', '.join(missing)} missing; run the command again")
    return result
