"""Result files that are truncated, foreign or hostile: one line that names the file, and never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.result_files import COMMITTED, content, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilkit.tools import cli
from dilkit.tools.commands import compare
from dilkit.tools.console.text import visible
from dilkit.tools.report import html as report_html
from dilkit.tools.report import markdown as report_text
from dilkit.tools.report import terminal
from dilkit.tools.report.document import Plot, Section
from dilkit.tools.results import schema, shapes
from dilkit.tools.results import untyped as results
from dilkit.tools.results.untyped import ResultError
from dilkit.tools.site import figures

WHOLE = content("sdpa-against-gather")
DEEP = b"[" * 100_000
HEAD = b'{"schema": 1, "kind": "bench", "command": "c", "date": "d", "environment": {}, '
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "blank": (b" \n\t ", "an empty file"),
    "truncated": (json.dumps(WHOLE).encode()[:-100], "truncated? run the command again"),
    "two objects": (b"{}{}", "not a whole JSON file"),
    "text": (b"hello", "not a whole JSON file"),
    "list": (b"[1, 2]", "no result of dilkit"),
    "number": (b"3", "no result of dilkit"),
    "other tool": (b'{"name": "x", "version": "1"}', "no result of dilkit"),
    "kind is a list": (b'{"schema": 1, "kind": []}', "no result of dilkit"),
    "kind is unknown": (HEAD.replace(b"bench", b"other") + b'"x": 1}', "no result of a known kind"),
    "schema is true": (HEAD.replace(b"1", b"true", 1) + b'"x": 1}', "schema True"),
    "schema is later": (HEAD.replace(b"1", b"99", 1) + b'"x": 1}', "schema 99"),
    "schema is an object": (HEAD.replace(b"1", b'{"a": 1}', 1) + b'"x": 1}', "this dilkit reads schema 1"),
    "no header": (b'{"schema": 1, "kind": "bench"}', "command, date, environment missing"),
    "utf-16": (json.dumps(WHOLE).encode("utf-16"), "not a text in UTF-8"),
    "latin-1": (b'{"a": "\xe9"}', "not a text in UTF-8 (byte 7)"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "not a text in UTF-8"),
    "zeros": (b"\0" * 5000, "not a whole JSON file"),
    "NaN": (HEAD + b'"x": NaN}', "the number NaN"),
    "infinity": (HEAD + b'"x": -Infinity}', "the number -Infinity"),
    "1e400": (HEAD + b'"x": 1e400}', "the number 1e400"),
    "5000 digits": (HEAD + b'"x": 1' + b"0" * 5000 + b"}", "(5,001 characters)"),
    "deep lists": (DEEP, "nested more than 32 deep"),
    "rather deep lists": (b"[" * 200 + b"]" * 200, "nested more than 32 deep"),
    "deep objects": (b'{"a":' * 100_000, "nested more than 32 deep"),
    "a name twice": (HEAD + b'"kind": "demo"}', "the name kind stands twice"),
    "gigantic text": (HEAD + b'"x": "' + b"a" * 3_000_000 + b'"}', "a text of 3,000,000 characters"),
    "gigantic name": (HEAD + b'"' + b"a" * 3_000_000 + b'": 1}', "a text of 3,000,000 characters"),
}
ESCAPES = "\x1b]0;title\x07\x1b[31mred\r\n\u202egnp.exe\u2028\x00\ud800"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["report", "compare"])
def test_files_that_are_no_results_are_told_in_one_line(name: str, command: str, tmp_path: Path, capsys: Any) -> None:
    raw, complaint = FILES[name]
    path = tmp_path / "r.json"
    path.write_bytes(raw)
    expected = "missing" if command == "compare" and name == "kind is unknown" else complaint
    assert cli.main([command, str(path), *([str(path)] if command == "compare" else [])]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"dilkit {command}: {path}: ")
    assert expected in told
    assert len(told.splitlines()) == 1
    assert len(told) < 500


@pytest.mark.parametrize("command", ["report", "compare"])
def test_what_is_no_file_is_told(command: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for path, complaint in (
        (tmp_path, "a folder; name the files in it"),
        (tmp_path / "none.json", "cannot be read: No such file"),
    ):
        assert cli.main([command, str(path), str(path)]) == 2
        assert f"{path}: {complaint}" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without an end")
def test_a_file_without_an_end_is_told(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilkit.tools.results.strict_json.MOST_BYTES", 2**20)
    assert cli.main(["report", "/dev/zero"]) == 2
    assert "/dev/zero: larger than 1 MiB" in capsys.readouterr().err


def test_a_name_of_a_file_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "a\x1b[31m\nb.json"
    path.write_text("{}")
    assert cli.main(["report", str(path)]) == 2
    assert "a\\x1b[31m b.json" in capsys.readouterr().err


def test_texts_are_made_visible_on_reading(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = content("sdpa-against-gather")
    found["command"] = found["environment"]["device_name"] = ESCAPES
    found["lengths"][0]["entries"] = {ESCAPES: found["lengths"][0]["entries"]["sdpa"]}
    path = write(tmp_path / "r.json", found)
    assert cli.main(["report", str(path)]) == 0
    assert cli.main(["report", str(path), "--json"]) == 0
    assert cli.main(["compare", str(path), str(path), "--all"]) == 0
    assert cli.main(["report", str(path), "--html", str(tmp_path / "r.html"), "--md", str(tmp_path / "r.md")]) == 0
    for shown in (capsys.readouterr().out, (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()):
        assert "\\x1b" in shown
        assert not {c for c in shown if not c.isprintable() and c != "\n"}


def test_visible_texts_are_one_line_and_printable() -> None:
    assert visible(ESCAPES) == "\\x1b]0;title\\x07\\x1b[31mred  \\u202egnp.exe \\x00\\ud800"
    assert visible("as it is, \u65e5\u672c") == "as it is, \u65e5\u672c"
    assert visible("abcdef", 3) == "abc..."


# Shapes


@pytest.mark.parametrize(
    ("shape", "good", "bad", "complaint"),
    [
        (schema.text, "a", 1, "x: 1 where a text is needed"),
        (schema.flag, True, 1, "x: 1 where true or false is needed"),
        (schema.number(0, 2), 1.5, True, "x: True where a number from 0 to 2 is needed"),
        (schema.number(0, 2), 2, 2.5, "x: 2.5 where a number from 0 to 2 is needed"),
        (schema.whole(1, 9), 1, 1.0, "x: 1.0 where a whole number from 1 to 9 is needed"),
        (schema.whole(1, 9), 9, 10, "x: 10 where a whole number from 1 to 9 is needed"),
        (schema.maybe(schema.text), None, 1, "x: 1 where a text is needed"),
        (schema.listed(schema.text, 1), ["a"], [], "x: a list of 0, where 1 to 20000 are needed"),
        (schema.listed(schema.text), [], ["a", 1], "x[1]: 1 where a text is needed"),
        (schema.listed(schema.text), [], {}, "x: an object where a list is needed"),
        (schema.named(schema.text, 1), {"a": "b"}, {}, "x: an object of 0, where 1 to 1000 are needed"),
        (schema.named(schema.text), {}, {"a": 1}, "x.a: 1 where a text is needed"),
        (schema.fields({"a": schema.text}), {"a": "b", "c": 1}, {"c": 1}, "x: a missing"),
        (schema.fields({}, {"a": schema.text}), {}, {"a": []}, "x.a: a list where a text is needed"),
        (schema.matching("a+", "only a"), "aa", "ab", "x: 'ab' where only a is needed"),
        (schema.chosen(lambda found: schema.fields({"a": schema.text})), {"a": ""}, [], "x: a list where an object is needed"),
        (schema.text, "a", 10**30, "x: 1000000000000000000000000000000 where a text is needed"),
        (schema.flag, False, "a" * 99, f"x: '{'a' * 39}... where true or false is needed"),
    ],
)
def test_shapes(shape: schema.Shape, good: Any, bad: Any, complaint: str) -> None:
    assert shape(good, "x") is None
    assert shape(bad, "x") == complaint


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_files_have_their_shape(path: Path) -> None:
    figures.load(path)


# Mutants of the committed files

NUMBERS = (
    st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0, 1, 1e-12, 2**62])
)
TEXTS = st.text(max_size=8) | st.sampled_from(["<b>", "|", "`", "$\\frac{", "\x1b[31m", "failed", "time", "2048"])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5)


@st.composite
def mutants(draw: st.DrawFn) -> Any:
    """A committed result in which something is replaced, left out, added or renamed."""
    found = content(draw(st.sampled_from([path.stem for path in COMMITTED])))
    for _ in range(draw(st.integers(1, 3))):
        _mutate(draw, found)
    return found


def _mutate(draw: st.DrawFn, value: Any) -> None:
    """Go down into `value` and change something there."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        inner = value[key]
        if isinstance(inner, (dict, list)) and inner and draw(st.integers(0, 5)):
            value = inner
            continue
        change = draw(st.sampled_from(["replace", "replace", "replace", "leave out", "add"]))
        if change == "leave out":
            del value[key]
        elif change == "add" and isinstance(value, list):
            value.insert(key, draw(VALUES))
        else:
            value[draw(TEXTS) if change == "add" else key] = draw(VALUES)
        return


def tell(path: Path, draw: Callable[[Plot, int], str] | None = None) -> None:
    """All that reports do with a file."""
    kind, result = figures.load(path)
    sections = [Section(path.stem, result["kind"], result["command"], kind.tell(result))]
    page = report_html.page(sections, draw)
    assert "<b>" not in page
    assert terminal.text(sections)
    assert report_text.markdown(sections, lambda plot: None)
    json.dumps([plot.title for plot in sections[0].document.plots], allow_nan=False)
    kind.short(result), kind.whole(result)


def told_or_refused(path: Path, draw: Callable[[Plot, int], str] | None = None) -> None:
    for judge in (partial(tell, draw=draw), compare.load):
        complaint = ""
        try:
            judge(path)
        except ResultError as error:
            complaint = str(error)
        assert not complaint or complaint.startswith(f"{path}: ")
        assert complaint.isprintable()


FUZZ = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@FUZZ
@given(found=mutants())
def test_a_mutant_is_told_or_refused_in_a_line(found: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.getbasetemp() / "mutant.json", found)
    told_or_refused(path)


@pytest.mark.slow
@settings(FUZZ, max_examples=1000, derandomize=False)
@given(found=mutants())
def test_many_more_mutants_are_drawn_too(found: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    svg_plot = pytest.importorskip("dilkit.tools.report.picture")
    told_or_refused(write(tmp_path_factory.getbasetemp() / "mutants.json", found), svg_plot.svg)


@settings(FUZZ, max_examples=150)
@given(raw=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused_in_a_line(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(raw)
    with pytest.raises(ResultError) as raised:
        figures.load(path)
    assert str(raised.value).isprintable()


def test_the_environment_of_this_machine_has_its_shape() -> None:
    from dilkit.device import probe

    assert shapes.result({})(results.new("bench", probe("cpu")), "") is None
