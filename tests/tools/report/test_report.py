"""`dilkit report`."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.result_files import COMMITTED, FOLDER

from dilkit.tools import cli
from dilkit.tools.report import html, markdown, registry
from dilkit.tools.report.document import Axis, Document, Plot, Point, Section, Series, Table
from dilkit.tools.report.points import plain
from dilkit.tools.results.statistics import median_interval, ratio_interval

picture = pytest.importorskip("dilkit.tools.report.picture")
CPU = FOLDER / "cpu-intel-xeon-avx512-amx.json"
LINES = Plot(
    "Time", "lines", (Series("one", (plain(1024, 0.5), plain(2048, 1.0))),), (Axis("tokens", "tokens"), Axis("t", "seconds"))
)


def section(path):
    (found,) = registry.sections_of([path])
    return found


def test_intervals_hold_what_they_are_of_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    medians = [median_interval(rng.normal(1.0, 0.1, 25)) for _ in range(100)]
    ratios = [ratio_interval(rng.normal(3.0, 0.3, 25), rng.normal(2.0, 0.2, 25)) for _ in range(100)]
    for expected, intervals in ((1.0, medians), (1.5, ratios)):
        assert 0.90 <= sum(low <= expected <= high for low, high in intervals) / 100 <= 0.995
    samples = [1.0, 1.2, 0.9, 1.1, 1.05]
    assert ratio_interval(samples, samples) == ratio_interval(samples, samples)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_result_has_a_document(path):
    document = section(path).document
    assert document.headline
    assert document.tables
    assert document.plots or path.stem.startswith(("costs", "gpu-day", "kernels", "ptx", "seeds"))
    for table in document.tables:
        assert {len(row) for row in table.rows} == {len(table.header)}
    for plot in document.plots:
        assert all(p.low <= p.y <= p.high for series in plot.series for p in series.points), plot.title


HOSTILE = ("$\\frac{$", "<script>alert(1)</script>", "]]>--><!--")


@pytest.mark.parametrize(("name", "kind"), list(zip(HOSTILE, ["lines", "points", "bars"], strict=True)))
def test_hostile_names_are_drawn_as_they_are(name, kind):
    x = [name, name + "2"] if kind == "bars" else [1, 2]
    series = tuple(Series(f"{name}{i}", (plain(x[0], 1.0), Point(x[1], 2.0, 1.5, 3.0))) for i in range(2))
    plot = Plot(name, kind, series, (Axis(name, "tokens"), Axis(name, "number")), mark=1.0)
    drawn = picture.svg(plot)
    ElementTree.fromstring(drawn)
    assert "<script" not in drawn
    assert picture.svg(plot) == drawn, "it does not depend on the day"


def test_the_page_needs_nothing_else_and_is_whole(tmp_path):
    paths = [FOLDER / "kernels.json", FOLDER / "overhead.json"]
    assert cli.main(["report", *map(str, paths), "--html", str(tmp_path / "r.html"), "--md", str(tmp_path / "a (b).md")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "](a%20%28b%29-1.svg)" in (tmp_path / "a (b).md").read_text()
    ElementTree.fromstring((tmp_path / "a (b)-1.svg").read_text())
    assert "<script" not in page
    assert page.count("<img") == sum(len(one.document.plots) for one in registry.sections_of(paths))
    assert page.rstrip().endswith("</html>")
    assert all(link.startswith("data:") for link in re.findall(r'\b(?:href|src)="([^"]*)"', page))


def test_hostile_texts_stay_texts():
    evil = "<img src=x onerror=alert(1)>\"'&|`[a](b)"
    document = Document((evil,), (Table(evil, (evil,), ((evil,),), evil),), (LINES,), (evil,), evil)
    one = Section(evil, evil, evil, document)
    page = html.page([one, one], picture.svg, evil)
    assert "<img src=x" not in page
    read = markdown.markdown([one], lambda plot: "p.svg", evil)
    row = next(line for line in read.splitlines() if line.startswith("| \\<img"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 2
    assert "\\[a\\](b)" in read


def test_json_holds_the_same_tables_and_plots(capsys):
    assert cli.main(["report", str(CPU)]) == 0
    assert re.search(r"one million tokens: memory in all +at most 16 GiB +at most 16 GiB +8\.03 GiB", capsys.readouterr().out)
    assert cli.main(["report", str(CPU), "--json"]) == 0
    printed, document = json.loads(capsys.readouterr().out), section(CPU).document
    assert printed["schema"] == 1
    (found,) = (one["document"] for one in printed["sections"])
    assert [table["title"] for table in found["tables"]] == [table.title for table in document.tables]
    assert len(found["plots"]) == len(document.plots)
