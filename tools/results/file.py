"""Result files: one JSON object a run, read into the typed record of its kind and written whole or not at all."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any, TypeVar

from dilkit import files
from dilkit.checks import visible
from dilkit.device import Device
from dilkit.tools.results.decode import DecodeError, decode, encode
from dilkit.tools.results.environment import Result, environment, now

R = TypeVar("R", bound=Result)


class ResultError(ValueError):
    """A file that is not a whole result of dilkit. The text, one line, names the file, what is wrong and the way out."""

    def __init__(self, path: Path, complaint: str) -> None:
        super().__init__(visible(f"{path}: {complaint}"))


def new_result(record: type[R], device: Device, **fields: Any) -> R:
    """Return a result of this run on `device`: the fields of every result, and `fields`."""
    program = Path(sys.argv[0]).name
    # The command names no folders of whoever measured.
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["dilkit" if program == "__main__.py" else program, *arguments])
    known: dict[str, Any] = dict(kind=record.KIND, command=command, date=now(), environment=environment(device))
    return record(**known | fields)


def write_result(result: Result, path: Path) -> None:
    """Write `result` as JSON. Raises ValueError for NaN or infinity."""
    write_text(path, json.dumps(encode(result), indent=1, allow_nan=False) + "\n")


def read_result(path: Path, record: type[R], kind: str = "") -> R:
    """Return the result in `path`, which must be of this kind, by default the record's. Raises `ResultError`."""
    data, kind = read_json(path), kind or record.KIND
    if data["kind"] != kind:
        raise ResultError(path, f"a result of kind {data['kind'][:40]!r}; {kind!r} is needed")
    if data["schema"] != record.SCHEMA:
        schema = f"schema {data['schema']!r:.20}; this dilkit reads schema {record.SCHEMA}"
        raise ResultError(path, f"{schema}, run the command again")
    try:
        return decode(record, data)
    except DecodeError as error:
        raise ResultError(path, f"{error}: not what dilkit writes; run the command again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, which has a schema and a kind; its texts are printable. Raises `ResultError`."""
    try:
        data = _printable(json.loads(files.read_bytes(path).decode()))
    except OSError as error:
        raise ResultError(path, f"cannot be read: it {files.why_not(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ResultError(path, f"not a whole JSON file ({error}); truncated? run the command again") from None
    if not isinstance(data, dict) or "schema" not in data or not isinstance(data.get("kind"), str):
        raise ResultError(path, "no result of dilkit, which has a schema and a kind; one is written by `dilkit bench`")
    return data


def _printable(value: Any) -> Any:
    """Return plain data, its texts without characters that a terminal would obey."""
    if isinstance(value, dict):
        return {visible(name): _printable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return visible(value) if isinstance(value, str) else value


def write_text(path: Path, text: str) -> None:
    """Put `text` in place of `path` in one step, making its folder where there is none."""
    with files.replacing(path) as file:
        file.write(text.encode())
