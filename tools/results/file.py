"""The result file: one JSON object a run, holding everything a figure rests on. Every published figure is read out of one.

schema, kind          1, and which command's result it is ("bench", "overhead", ...)
command, date         the command line, and when it ended (UTC)
environment           device, threads, versions, git revision and whether there were changes beside it
...                   what the command adds: the problem, all samples, the check that passed before the timing
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import dilkit
from dilkit.device import Device, probe
from dilkit.problem import Problem
from dilkit.tools.console.text import visible
from dilkit.tools.results import strict_json

SCHEMA = 1
_COMMON = ("schema", "kind", "command", "date", "environment")


class ResultError(ValueError):
    """A file that is not a whole result of dilkit. The text, one line, names the file, what is wrong and the way out."""

    def __init__(self, path: Path, complaint: str) -> None:
        super().__init__(visible(f"{path}: {complaint}"))


def new(kind: str, device: Device, **fields: Any) -> dict[str, Any]:
    """A result of this run: the fields that every result has, then `fields`."""
    program = Path(sys.argv[0]).name
    command = shlex.join(["dilkit" if program == "__main__.py" else program, *sys.argv[1:]])
    return dict(schema=SCHEMA, kind=kind, command=command, date=now(), environment=environment(device), **fields)


def now() -> str:
    """The time (UTC), as results tell it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def environment(device: Device) -> dict[str, Any]:
    """What a figure measured on `device` depends on besides the problem."""
    import torch

    cpu = probe("cpu")
    facts = dict(device=device.type, device_name=device.name, features=sorted(device.features), memory_bytes=device.memory)
    if device.capability is not None:
        facts |= dict(capability=f"{device.capability[0]}.{device.capability[1]}", cuda=torch.version.cuda)
    facts |= dict(cpu=cpu.name, cores=usable_cores(), threads=torch.get_num_threads())
    facts |= dict(system=f"{platform.system()} {platform.machine()}", python=platform.python_version())
    versions = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {**facts, **versions, "dilkit": dilkit.__version__, **git_state(Path(dilkit.__file__).parent.parent)}


def usable_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_TOLD = ("docs", "README.md")


def git_state(folder: Path) -> dict[str, Any]:
    """The revision checked out in `folder` and whether tracked files differ from it; both None outside a checkout.

    Files of results, the pages made of them and their pictures do not count: they say nothing of what is measured.
    """
    unknown = dict(git_revision=None, git_dirty=None)
    if not (folder / ".git").exists():
        return unknown
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        code = [".", *(f":(exclude){path}" for path in _TOLD)]
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *code)
        return dict(git_revision=revision, git_dirty=bool(changed))
    except (OSError, subprocess.SubprocessError):
        return unknown


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def describe_problem(problem: Problem) -> dict[str, Any]:
    """`problem` without its length and device, as plain data; "backward" says whether a call includes the backward pass."""
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "is_causal", "key_padding_mask", "scale")
    pattern = dict(text=str(problem.pattern), **json.loads(problem.pattern.to_json()))
    return dict(pattern=pattern, **{name: getattr(problem, name) for name in names}, backward=problem.requires_grad)


def save(result: dict[str, Any], path: Path) -> None:
    """Write `result` as JSON, whole or not at all: a reader never sees half a file. Raises ValueError for NaN or infinity."""
    write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Put `text` in the place of `path` in one step, making its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
