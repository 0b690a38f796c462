"""`dilkit bench --suite slides`: the command at a tiny size, its check, and the published procedure that it compares with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.slide_encoder import LENGTHS, SMALL, embeddings, slide, small

from dilkit.integrations.gigapath import SlideEncoderConfig
from dilkit.tools import cli
from dilkit.tools.bench.slides import calls, suite
from dilkit.tools.measure.published_slides import published_embedding
from dilkit.tools.results.file import read_result
from dilkit.tools.results.kinds.slides import SlidesResult

TINY = dict(TILES=40, LONG=70, SEVERAL=(5, 9, 33), SEVERAL_DEPTH=1, HEAD_DIMS=(12, 16), MATMUL=64, THREADS=1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tiny_yardsticks: None) -> None:
    for name, value in dict(TINY, CONFIG=SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS)).items():
        monkeypatch.setattr(suite, name, value)
    monkeypatch.setattr(calls, "CHECKED", 50)
    monkeypatch.setattr(suite.SlidesSuite, "DIVISOR", 1)


def run(out: Path, *arguments: str) -> tuple[int, SlidesResult]:
    code = cli.main(["bench", "--suite", "slides", "--repeats", "2", "--out", str(out), *arguments])
    return code, read_result(out / "suite.json", SlidesResult)


@pytest.mark.usefixtures("tiny")
def test_the_suite_measures_and_judges_everything(tmp_path: Path) -> None:
    code, result = run(tmp_path, "--quick", "--full")
    assert code == 0
    entries = [entry for case in (*result.head_dims, *result.encoder, *result.several) for entry in case.entries.values()]
    assert [entry.verdict for entry in entries] == ["measured"] * 8
    assert [row.gradients for row in result.long] == [False, True]
    assert all(figure.values for figure in result.figures)
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "suite.md").read_text()
    assert page.count("40 tiles") >= 3
    assert "5, 9, 33 tiles" in page


@pytest.mark.usefixtures("tiny")
def test_embeddings_that_differ_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> torch.Tensor:
        return published_embedding(*arguments) * 1.001

    monkeypatch.setattr(suite, "published_embedding", other)
    code, result = run(tmp_path, "--quick")
    assert code == 1
    assert {name: entry.verdict for name, entry in result.encoder[0].entries.items()} == {"dilkit": "wrong"}
    verdicts = [figure.verdict for figure in result.figures]
    assert verdicts[:2] == ["not measured"] * 2
    assert verdicts[3].startswith("not measurable here: it takes long")


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 13, 30)], ids=["multiples of the rates", "others"])
@pytest.mark.parametrize("n", [2, 31, 45, 70])
def test_the_published_procedure_is_that_of_the_paper(n: int, lengths: tuple[int, ...]) -> None:
    model, (tiles, coords) = small(segment_lengths=lengths), slide(n)
    *_, exact = embeddings(model.state_dict(), model.config, tiles[0], coords[0])
    assert (published_embedding(model, tiles, coords)[0] - exact).abs().max() <= 1e-12
