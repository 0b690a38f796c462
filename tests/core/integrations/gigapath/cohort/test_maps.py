"""Maps of attention: squares for QuPath where the tiles are, and an image; what is missing for them is said."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers.cohorts import cohort, embed, write_slide
from helpers.slide_encoder import slide, small

from dilkit.integrations.gigapath import attention_map
from dilkit.integrations.gigapath.cohort.geojson import write_geojson
from dilkit.integrations.gigapath.cohort.run import plan_cohort
from dilkit.integrations.gigapath.cohort.settings import ReadSettings


def test_squares_lie_where_tiles_do_and_hold_their_weights(tmp_path):
    weights = torch.tensor([0.1, 0.4, 0.1, 0.2])
    coords = torch.tensor([[0, 0], [256, 0], [0, 256], [512, 1024]])
    write_geojson(tmp_path / "a.geojson", weights, coords, 256, 2.0)
    content = json.loads((tmp_path / "a.geojson").read_text())
    assert content["type"] == "FeatureCollection"
    last = content["features"][3]
    assert last["geometry"]["coordinates"] == [[[1024, 2048], [1536, 2048], [1536, 2560], [1024, 2560], [1024, 2048]]]
    measured = [one["properties"]["measurements"] for one in content["features"]]
    assert [one["attention"] for one in measured] == pytest.approx(weights.tolist())
    assert [one["relative"] for one in measured] == pytest.approx([0.5, 2.0, 0.5, 1.0])
    assert (measured[1]["percentile"], measured[3]["percentile"]) == (75.0, 50.0)
    assert {one["type"] for one in content["features"]} == {"Feature"}


def test_maps_lie_beside_the_embeddings(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths, job = cohort(tmp_path, heatmaps=True)
    embed(paths[:2], job)
    assert sorted(path.name for path in job.out.iterdir()) == sorted(
        [f"s{i}.{end}" for i in (0, 1) for end in ("pt", "png", "geojson")] + ["manifest.json"]
    )
    shapes = json.loads((job.out / "s0.geojson").read_text())["features"]
    right = attention_map(small(), *slide(30, 0))[0].float().mean(dim=0)
    written = [one["properties"]["measurements"]["attention"] for one in shapes]
    assert written == pytest.approx(right.tolist(), rel=1e-5)
    assert (job.out / "s0.png").read_bytes().startswith(b"\x89PNG")
    assert embed(paths[:2], job)[1] == ["s0.pt", "s1.pt"]


def test_a_map_that_is_missing_is_made(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths, job = cohort(tmp_path, heatmaps=True)
    embed(paths[:2], job)
    (job.out / "s1.geojson").unlink()
    assert embed(paths[:2], job)[:2] == (["s1.pt"], ["s0.pt"])
    assert (job.out / "s1.geojson").exists()


def test_matplotlib_is_asked_for_before_anything_is_computed(tmp_path, monkeypatch):
    paths, job = cohort(tmp_path, heatmaps=True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"--heatmap needs matplotlib.*pip install 'dilkit\[plot\]'"):
        plan_cohort(paths, job)


def test_micrometres_need_the_pixels_of_the_scan(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths, job = cohort(tmp_path, heatmaps=True)
    said = dict(unit="um", tile_size_um=256.0, tile_size_px=256)
    write_slide(paths[0], 30, **said)
    refused = embed(paths[:1], job)[2]
    assert "give --microns-per-pixel, as the scan says, or leave out --heatmap" in refused[0]
    (tmp_path / "scan").mkdir()
    paths, job = cohort(tmp_path / "scan", heatmaps=True, reading=ReadSettings(microns_per_pixel=0.25))
    write_slide(paths[0], 30, **said)
    assert embed(paths[:1], job)[2] == []
    square = json.loads((job.out / "s0.geojson").read_text())["features"][0]["geometry"]["coordinates"][0]
    assert square[1][0] - square[0][0] == 1024
