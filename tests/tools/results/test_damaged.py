"""Result files that are truncated or foreign."""

import json
from dataclasses import dataclass

import pytest
from helpers.result_files import content, write

from dilkit.checks import visible
from dilkit.tools import cli
from dilkit.tools.results.decode import DecodeError, decode, encode

CPU = content("cpu-intel-xeon-avx2")
FILES = {
    "empty": (b"", "not a whole JSON file"),
    "truncated": (json.dumps(CPU).encode()[:-100], "truncated? run the command again"),
    "list": (b"[1, 2]", "no result of dilkit"),
    "other tool": (b'{"name": "x", "version": "1"}', "no result of dilkit"),
    "kind is a list": (b'{"schema": 1, "kind": []}', "no result of dilkit"),
    "schema is true": (json.dumps(CPU | dict(schema=True)).encode(), "schema True; this dilkit reads"),
    "schema is later": (json.dumps(CPU | dict(schema=99)).encode(), "schema 99; this dilkit reads"),
    "of an earlier dilkit": (json.dumps(content("patterns") | dict(schema=1)).encode(), "; this dilkit reads schema 2, run the"),
    "no header": (b'{"schema": 2, "kind": "suite-cpu"}', "command: missing"),
    "NaN": (json.dumps(CPU | dict(repeats=float("nan"))).encode(), "repeats: nan where a whole number is needed"),
    "utf-16": (json.dumps(CPU).encode("utf-16"), "not a whole JSON file"),
    "5000 digits": (b'{"schema": 1' + b"0" * 5000 + b"}", "not a whole JSON file"),
    "deep lists": (b"[" * 100_000, "not a whole JSON file"),
}
ESCAPES = "\x1b]0;title\x07\x1b[31mred\r\n\u202egnp.exe\u2028\x00\ud800"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_file_that_is_no_result_is_refused_in_one_line(name, command, tmp_path, capsys):
    raw, complaint = FILES[name]
    path = tmp_path / "r.json"
    path.write_bytes(raw)
    assert cli.main([command, str(path), *([str(path)] if command == "compare" else [])]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dilkit {command}: {path}: ")
    assert complaint in said
    assert len(said.splitlines()) == 1
    assert len(said) < 500


def test_texts_cannot_command_the_terminal(tmp_path, capsys):
    found = content("patterns")
    found["command"] = found["environment"]["device_name"] = ESCAPES
    found["rows"] = [found["rows"][1] | dict(who=ESCAPES)]
    path = write(tmp_path / "r.json", found)
    assert cli.main(["report", str(odd := tmp_path / "a\x1b[31m\nb.json")]) == 2
    assert f"dilkit report: {visible(str(odd))}: cannot be read: " in capsys.readouterr().err
    assert cli.main(["report", str(path)]) == cli.main(["report", str(path), "--json"]) == 0
    assert cli.main(["compare", str(path), str(path), "--all"]) == 0
    assert cli.main(["report", str(path), "--html", str(tmp_path / "r.html"), "--md", str(tmp_path / "r.md")]) == 0
    for shown in (capsys.readouterr().out, (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()):
        assert "\\x1b" in shown
        assert not {c for c in shown if not c.isprintable() and c != "\n"}


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float
    whole: int | None = None
    flag: bool = False
    pair: tuple[int, str] = (0, "")
    inner: tuple[Inner, ...] = ()
    named: dict[str, Inner] | None = None


GOOD = dict(name="x", ratio=1, whole=None, pair=[3, "y"], inner=[dict(size=1)], named=dict(z=dict(size=2, other=0)))


def test_what_is_encoded_is_decoded_again():
    found = decode(Outer, GOOD)
    assert found == Outer("x", 1.0, None, False, (3, "y"), (Inner(1),), {"z": Inner(2)})
    assert decode(Outer, json.loads(json.dumps(encode(found)))) == found


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(name=1), "name: 1 where a text is needed"),
        (dict(ratio="1"), "ratio: '1' where a number is needed"),
        (dict(ratio=True), "ratio: True where a number is needed"),
        (dict(ratio=float("nan")), "ratio: nan where a finite number is needed"),
        (dict(ratio=10**400), "where a finite number is needed"),
        (dict(whole=1.0), "whole: 1.0 where a whole number is needed"),
        (dict(flag=0), "flag: 0 where true or false is needed"),
        (dict(pair=[1]), "pair: a list of 1 where 2 are needed"),
        (dict(inner={}), "inner: an object where a list is needed"),
        (dict(inner=[dict(size=1), dict()]), "inner[1].size: missing"),
        (dict(named=[]), "named: a list where an object is needed"),
        (dict(named=dict(z=dict(size=None))), "named.z.size: None where a whole number is needed"),
    ],
)
def test_the_decoder_names_the_place(change, complaint):
    with pytest.raises(DecodeError) as raised:
        decode(Outer, GOOD | change)
    assert complaint in str(raised.value)
