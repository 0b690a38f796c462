"""`dilkit report`: intervals, the documents of every kind, and how they are written as text, Markdown, HTML and pictures."""

from __future__ import annotations

import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.pairwise import diagonal
from helpers.result_files import COMMITTED, FOLDER, content, write

from dilkit.tools import cli
from dilkit.tools.report import axes, html, markdown, registry
from dilkit.tools.report.document import Axis, Document, Plot, Point, Section, Series, Table, plots
from dilkit.tools.report.points import plain, speed_up
from dilkit.tools.report.speed import faster
from dilkit.tools.report.units import UNITS
from dilkit.tools.results.record import Case, Entry, Samples
from dilkit.tools.results.statistics import median_interval, ratio_interval

picture = pytest.importorskip("dilkit.tools.report.picture")
CPU = FOLDER / "cpu.json"
LINES = Plot(
    "Time", "lines", (Series("one", (plain(1024, 0.5), plain(2048, 1.0))),), (Axis("tokens", "tokens"), Axis("t", "seconds"))
)


def section(path: Path) -> Section:
    (found,) = registry.sections_of([path])
    return found


# Intervals


def test_intervals_hold_what_they_are_of_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    medians = [median_interval(rng.normal(1.0, 0.1, 25)) for _ in range(100)]
    ratios = [ratio_interval(rng.normal(3.0, 0.3, 25), rng.normal(2.0, 0.2, 25)) for _ in range(100)]
    for expected, intervals in ((1.0, medians), (1.5, ratios)):
        assert 0.90 <= sum(low <= expected <= high for low, high in intervals) / 100 <= 0.995
    samples = [1.0, 1.2, 0.9, 1.1, 1.05]
    assert ratio_interval(samples, samples) == ratio_interval(samples, samples)


def test_long_lists_are_resampled_in_parts_of_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = list(np.random.default_rng(0).random(50))
    whole = median_interval(samples)
    monkeypatch.setattr("dilkit.tools.results.statistics._AT_ONCE", 120)
    assert median_interval(samples) == whole


def test_few_samples_claim_nothing_beyond_themselves() -> None:
    assert median_interval([2.0]) == (2.0, 2.0)
    assert median_interval([2.0, 1.0]) == (1.0, 2.0)
    assert ratio_interval([4.0, 2.0], [1.0, 2.0]) == (1.0, 4.0)


# Documents


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_result_has_a_document(path: Path) -> None:
    document = section(path).document
    assert document.headline
    assert document.tables
    assert document.plots
    for table in document.tables:
        assert {len(row) for row in table.rows} == {len(table.header)}
    for plot in document.plots:
        assert all(p.low <= p.y <= p.high for series in plot.series for p in series.points), plot.title


def test_speed_ups_are_ratios_of_medians_with_their_interval() -> None:
    (case,) = (
        c for c in content("cpu")["cases"] if (c["config"], c["head_dim"], c["is_causal"], c["backward"]) == ("A", 64, 0, 0)
    )
    slow, fast = (case["entries"][name]["time"]["samples_s"] for name in ("gather", "native"))
    expected = float(np.median(slow) / np.median(fast))
    assert speed_up("", slow, fast).y == pytest.approx(expected)
    table = next(table for table in section(CPU).document.tables if table.title == "Speed-up of native")
    (cell,) = (row[2] for row in table.rows if row[:2] == ("A, d=64", "gather"))
    assert cell.startswith(f"{expected:.2f}x (")


def test_a_speed_up_is_how_many_times_faster_ours_is() -> None:
    entries = {name: Entry(time=Samples.of((seconds,) * 3)) for name, seconds in dict(ours=1.0, other=2.0).items()}
    ((name, point),) = faster([("a case", Case(entries=entries))], "ours", "other")
    assert (name, point.x, point.y) == ("other", "a case", 2.0)


@pytest.mark.parametrize("name", ["cpu", "ring"])
def test_an_interrupted_suite_says_so(name: str, tmp_path: Path) -> None:
    found = content(name)
    found |= {key: [] for key, value in found.items() if isinstance(value, list) and key != "processes"}
    document = section(write(tmp_path / "r.json", found | dict(interrupted=True))).document
    assert any("INTERRUPTED" in line for line in document.headline)
    assert document.plots == ()


def test_empty_plots_are_left_out() -> None:
    roof = Series("roof", (plain(1, 1.0),), dashed=True)
    assert plots(Plot("a", "points", (roof, Series("nobody", ())), LINES.axes), LINES) == (LINES,)


# Pictures


def test_a_picture_is_an_element_that_can_be_read() -> None:
    drawn = picture.svg(LINES)
    tree = ElementTree.fromstring(drawn)
    assert tree.get("role") == "img"
    assert tree.get("aria-label") == "Time. one: 500 ms at 1K to 1 s at 2K."
    assert tree.get("width") is None
    assert "var(--series-1, #0b6e99)" in drawn


def test_pictures_do_not_depend_on_the_day_and_share_no_ids() -> None:
    first, second = picture.svg(LINES, 1), picture.svg(LINES, 2)
    assert picture.svg(LINES, 1) == first
    ids = [set(re.findall(r'\bid="([^"]*)"', drawn)) for drawn in (first, second)]
    assert not ids[0] & ids[1]
    for number, drawn in enumerate((first, second)):
        assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', drawn)) <= ids[number]


HOSTILE = ("$\\frac{$", "<script>alert(1)</script>", "x" * 5000, "_hidden", "", "]]>--><!--")


@pytest.mark.parametrize(("name", "kind"), diagonal(HOSTILE, ["lines", "points", "bars"]))
def test_hostile_names_are_drawn_as_they_are(kind: Any, name: str) -> None:
    x: list[Any] = [name, name + "2"] if kind == "bars" else [1, 2]
    series = tuple(Series(f"{name}{i}", (plain(x[0], 1.0), Point(x[1], 2.0, 1.5, 3.0))) for i in range(2))
    drawn = picture.svg(Plot(name, kind, series, (Axis(name, "tokens"), Axis(name, "number")), mark=1.0))
    ElementTree.fromstring(drawn)
    assert "<script" not in drawn


def test_of_very_much_a_part_is_drawn_and_what_no_axis_can_show_is_left_out() -> None:
    series = tuple(
        Series(f"{'s' * 90}{i}", tuple(plain(f"bar {j} has a name of two lines, a second line", 1) for j in range(600)))
        for i in range(40)
    )
    drawn = picture.svg(Plot("many", "bars", series, (Axis("", "number"), Axis("", "times"))))
    assert "bar 0" in drawn
    assert "second line" in drawn
    assert "bar 599" not in drawn
    assert len({drawn.count(f"--series-{i}, ") for i in range(1, picture.MOST_SERIES + 1)}) == 1  # once in the legend
    nothing = Plot("Time", "lines", (Series("one", (plain(0, 0.0),)),), LINES.axes)
    assert "nothing that these axes can show" in picture.svg(nothing)


@pytest.mark.parametrize(
    ("low", "high", "binary"),
    [(1e-12, 1e36, False), (0.9, 1.1, False), (1.301, 1.302, False), (1, 2**62, True), (129, 150, True), (1e6, 1e6 + 3, True)],
)
def test_ticks_are_few_and_inside(low: float, high: float, binary: bool) -> None:
    ticks = axes.log_ticks(low, high, binary)
    assert 2 <= len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)


def test_units_are_written_for_people() -> None:
    shown = {unit: UNITS[unit](value) for unit, value in dict(bytes=3 * 2**20, seconds=0.0042, gflops=1500, tokens=16384).items()}
    assert shown == dict(bytes="3 MiB", seconds="4.2 ms", gflops="1.5 TFLOP/s", tokens="16K")
    assert [UNITS["tokens"](count) for count in (300_000, 1_000_000)] == ["300,000", "1M"]


# The page


class Reader(HTMLParser):
    """What a page holds: its tags and links, and what is left open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag in self.open:
            self.open.pop()


def test_the_page_needs_nothing_else_and_is_whole(tmp_path: Path) -> None:
    paths = [FOLDER / "kernels.json", FOLDER / "overhead.json"]
    assert cli.main(["report", *map(str, paths), "--html", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    read = Reader(page)
    assert read.open == []
    assert "script" not in read.tags
    assert read.tags.count("svg") == sum(len(one.document.plots) for one in registry.sections_of(paths))
    assert all(link.startswith("#") or link == "data:," for link in read.links)
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert all(f'id="{link[1:]}"' in page for link in read.links if link.startswith("#result"))


def test_every_series_of_a_plot_has_a_colour_of_its_own_in_both_schemes() -> None:
    assert len({*picture.COLORS}) == picture.MOST_SERIES
    page = html.page([section(CPU)], None)
    light, dark = (re.findall(r"--series-(\d+): (#\w{6});", half) for half in page.split("prefers-color-scheme: dark")[:2])
    assert light == [(str(i), color) for i, color in enumerate(picture.COLORS, 1)]
    assert len({color for _, color in dark}) == len(dark) == len(light)


def test_hostile_texts_stay_texts() -> None:
    evil = "<img src=x onerror=alert(1)>\"'&|`[a](b)"
    document = Document((evil,), (Table(evil, (evil,), ((evil,),), evil),), (LINES,), (evil,), evil)
    one = Section(evil, evil, evil, document)
    page = html.page([one, one], picture.svg, evil)
    assert "<img" not in page
    assert "img" not in Reader(page).tags
    read = markdown.markdown([one], lambda plot: "p.svg", evil)
    row = next(line for line in read.splitlines() if line.startswith("| \\<img"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 2
    assert "\\[a\\](b)" in read


def test_without_matplotlib_the_tables_remain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    paths = [str(tmp_path / name) for name in ("r.html", "r.md")]
    assert cli.main(["report", str(CPU), "--html", paths[0], "--md", paths[1]]) == 0
    assert "dilkit[plot]" in capsys.readouterr().err
    for path in map(Path, paths):
        assert "No plots" in path.read_text()
        assert "one million tokens" in path.read_text()
    assert "<svg" not in Path(paths[0]).read_text()


# The command


def test_tables_are_printed_where_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(CPU)]) == 0
    printed = capsys.readouterr().out
    assert "== cpu (suite)" in printed
    assert re.search(r"one million tokens: memory in all +at most 16 GiB +at most 16 GiB +8\.03 GiB", printed)


def test_json_holds_the_same_tables_and_plots(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(CPU), "--json"]) == 0
    printed, document = json.loads(capsys.readouterr().out), section(CPU).document
    assert printed["schema"] == 1
    (found,) = (one["document"] for one in printed["sections"])
    assert [table["title"] for table in found["tables"]] == [table.title for table in document.tables]
    assert len(found["plots"]) == len(document.plots)


def test_markdown_has_its_pictures_beside_it(tmp_path: Path) -> None:
    assert cli.main(["report", str(FOLDER / "overhead.json"), "--md", str(tmp_path / "a (b).md")]) == 0
    page = (tmp_path / "a (b).md").read_text()
    assert "](a%20%28b%29-1.svg)" in page
    ElementTree.fromstring((tmp_path / "a (b)-1.svg").read_text())


def test_files_with_the_same_name_are_named_by_their_paths(tmp_path: Path) -> None:
    other = write(tmp_path / CPU.name, content("cpu"))
    assert [one.name for one in registry.sections_of([CPU, other])] == [str(CPU), str(other)]


@pytest.mark.parametrize("option", ["--html", "--md"])
def test_a_folder_is_no_file_to_write(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(CPU), option, str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == f"dilkit report: {option}: {tmp_path} is a folder; name the file to write in it"
