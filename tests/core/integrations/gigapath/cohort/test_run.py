"""A run over a cohort: right embeddings and maps of attention; what is there is kept, what is not the same is made again."""

import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.forks import in_child
from helpers.slide_encoder import slide, small

from dilkit import files
from dilkit.integrations.gigapath import attention_map
from dilkit.integrations.gigapath.cohort import run
from dilkit.integrations.gigapath.cohort.embedding import write_geojson
from dilkit.integrations.gigapath.cohort.listing import CohortJob, ModelRecord, ReadSettings, refusal, sha256_of
from dilkit.integrations.gigapath.cohort.run import embed_share, finish, packs_of, plan_cohort, shares_of

LENGTHS = (30, 7, 12, 7, 3)
NAMES = [f"s{i}.pt" for i in range(len(LENGTHS))]


def write_slide(path, n, seed=0, **said):
    tiles, coords = slide(n, seed)
    torch.save({"features": tiles[0], "coords": coords[0], **said}, path)
    return path


def cohort(folder, **changes):
    (folder / "out").mkdir()
    torch.save({"model": small().state_dict()}, folder / "weights.pth")
    paths = [write_slide(folder / f"s{i}.pt", n, seed=i) for i, n in enumerate(LENGTHS)]
    facts = dict(pooling="class token", dtype="float64", tail="zeros", ngrids=20, layers=False)
    model = ModelRecord("tiny", str(folder / "weights.pth"), sha256_of(folder / "weights.pth"), **facts)
    return paths, replace(CohortJob(folder / "out", model), **changes)


def embed(paths, job, **changes):
    plan = plan_cohort(paths, job)
    records, refused = embed_share(small(**changes), plan, job)
    finish(plan, job, [*plan.refused, *refused])
    reasons = [one.reason for one in (*plan.refused, *refused)]
    return sorted(one.output for one in records), sorted(one.output for one in plan.kept), reasons


def manifest(job):
    return json.loads((job.out / "manifest.json").read_text())


def test_packed_slides_have_the_embeddings_that_they_have_alone(tmp_path):
    paths, job = cohort(tmp_path)
    plan = plan_cohort(paths, job)
    assert [len(pack) for pack in plan.shares[0]] == [5]
    assert plan.tiles == sum(LENGTHS)
    assert embed(paths, job) == (NAMES, [], [])
    for i, n in enumerate(LENGTHS):
        embedding = torch.load(job.out / f"s{i}.pt", weights_only=True)["embedding"]
        assert torch.allclose(embedding, small()(*slide(n, i))[0][0].float(), atol=1e-6)
    content = manifest(job)
    assert content["model"]["sha256"] == job.model.sha256
    assert content["versions"]["torch"] == torch.__version__
    assert [(one["output"], one["tiles"], one["tile_size"]) for one in content["slides"]] == [
        (name, n, 256) for name, n in zip(NAMES, LENGTHS, strict=True)
    ]
    assert [one["file"] for one in content["slides"]] == [str(path) for path in paths]


def test_what_is_there_is_kept_and_what_was_moved_is_the_same(tmp_path):
    paths, job = cohort(tmp_path)
    embed(paths[:3], job)
    assert embed(paths, job) == (NAMES[3:], NAMES[:3], [])
    assert embed(paths, job) == ([], NAMES, [])
    assert len(manifest(job)["slides"]) == 5
    (tmp_path / "moved").mkdir()
    moved = [path.rename(tmp_path / "moved" / path.name) for path in paths]
    assert embed(moved, replace(job, model=replace(job.model, checkpoint="elsewhere.pth"))) == ([], NAMES, [])


@pytest.mark.parametrize("change", ["same size", "output", "cut off", "damaged", "coordinates", "coordinates apart"])
def test_what_is_not_the_same_is_made_anew(tmp_path, change):
    paths, job = cohort(tmp_path)
    if change == "coordinates apart":
        tiles, coords = torch.load(paths[1]).values()
        paths[1] = paths[1].with_suffix(".npy")
        np.save(paths[1], tiles.numpy())
        np.save(tmp_path / "s1.coords.npy", coords.numpy())
    embed(paths, job)
    if change == "coordinates apart":
        np.save(tmp_path / "s1.coords.npy", coords.flip(0).numpy())
    elif change == "same size":
        write_slide(paths[1], LENGTHS[1], seed=9)
        os.utime(paths[1], ns=(0, 0))
    elif change == "output":
        (job.out / "s1.pt").unlink()
    elif change == "cut off":
        os.truncate(job.out / "s1.pt", 100)
    elif change == "damaged":
        kept = job.out / "manifest.json"
        kept.write_text(kept.read_text().replace(f'"bytes": {paths[1].stat().st_size}', '"bytes": 1', 1))
    else:
        times = paths[1].stat()
        write_slide(paths[1], LENGTHS[1], seed=1, patch_size_level0=256)
        os.utime(paths[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    written, kept, refused = embed(paths, job)
    assert "s1.pt" in written
    assert sorted(written + kept) == NAMES
    assert refused == []


def test_unreadable_outputs_are_made_anew_where_they_have_records(tmp_path):
    paths, job = cohort(tmp_path)
    embed(paths[:3], job)
    for i in (1, 3):
        (job.out / f"s{i}.pt").write_bytes(b"not of torch")
    plan_cohort(paths, job)  # and is killed, when the record of s1 has left the manifest
    assert [one["output"] for one in manifest(job)["slides"]] == [NAMES[0], NAMES[2]]
    written, _, refused = embed(paths, job)
    assert written == [NAMES[1], NAMES[4]]
    assert len(refused) == 1
    assert f"{job.out / 's3.pt'} is no file of tensors" in refused[0]
    assert (job.out / "s3.pt").read_bytes() == b"not of torch"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(sha256="0"), r"another checkpoint \(.*weights\.pth\)"),
        (dict(pooling="mean of tiles"), "pooling 'class token', not 'mean of tiles'"),
        (dict(dtype="float32", layers=True), "dtype 'float64', not 'float32'; layers False, not True"),
    ],
)
def test_embeddings_of_other_settings_are_not_replaced(tmp_path, change, said):
    paths, job = cohort(tmp_path)
    embed(paths[:2], job)
    before = {path.name: path.read_bytes() for path in job.out.iterdir()}
    with pytest.raises(ValueError, match=rf"out holds 2 embeddings made with {said}; .*choose another --out"):
        plan_cohort(paths, replace(job, model=replace(job.model, **change)))
    assert {path.name: path.read_bytes() for path in job.out.iterdir()} == before
    assert embed(paths[:2], replace(job, model=replace(job.model, ngrids=40))) == ([], NAMES[:2], [])


@pytest.mark.skipif(sys.platform != "linux", reason="no other system is asked for locks of folders")
def test_one_run_at_a_time_writes_to_a_folder(tmp_path):
    with files.locked(tmp_path), pytest.raises(ValueError, match="is written to by another run"), files.locked(tmp_path):
        pass
    with files.locked(tmp_path):
        pass


def test_slides_that_will_not_do_are_named_and_doubtful_ones_warned_of(tmp_path):
    paths, job = cohort(tmp_path)
    torch.save({"features": torch.randn(2, 10), "coords": torch.tensor([[0, 0], [0, 300000]])}, paths[1])
    torch.save({"features": torch.full((2, 10), torch.nan), "coords": torch.zeros(2, 2)}, paths[3])
    torch.save({"features": torch.randn(10, 10), "coords": torch.zeros(10, 2).long()}, paths[2])
    paths[4].write_bytes(b"damaged")
    written, _, refused = embed(paths, job)
    assert written == ["s0.pt", "s2.pt"]
    assert sorted(text.split(": ")[0].rpartition("/")[2][:5] for text in refused) == ["s1.pt", "s3.pt", "s4.pt"]
    assert any("lie outside the grid" in text for text in refused)
    assert len(manifest(job)["refused"]) == 3
    [none, [text]] = [one["warnings"] for one in manifest(job)["slides"]]  # of the slide that it is about alone
    assert none == []
    assert text.startswith("coords: 10 of 10 tiles share a cell")
    write_slide(paths[1], 4)
    assert embed(paths, job)[:2] == (["s1.pt"], ["s0.pt", "s2.pt"])


@pytest.mark.skipif(sys.platform != "linux", reason="a process is forked that has loaded torch")
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_killed_loses_nothing(tmp_path, monkeypatch, ranks):
    paths, job = cohort(tmp_path)
    monkeypatch.setattr(run, "packs_of", lambda slides: packs_of(slides, 1))
    plan = plan_cohort(paths, job, ranks)
    done = []

    def killed(tiles):
        done.append(tiles)
        if len(done) == 2 // ranks:
            os.kill(os.getpid(), signal.SIGKILL)

    def embed_until_killed(rank):
        torch.set_num_threads(1)  # a forked child has none of the threads that this process has started
        embed_share(small(), plan, job, rank, killed)

    for rank in range(ranks):
        assert in_child(partial(embed_until_killed, rank)) == f"signal {int(signal.SIGKILL)}"
    there = sorted(path.name for path in job.out.glob("s*.pt"))
    assert len(there) == 2
    written, kept, refused = embed(paths, job)
    assert (kept, sorted(written + kept), refused) == (there, NAMES, [])
    assert [path.name for path in job.out.glob("manifest*")] == ["manifest.json"]


def test_ranks_divide_the_slides_and_their_manifests_come_together(tmp_path):
    paths, job = cohort(tmp_path)
    plan = plan_cohort(paths, job, ranks=2)
    plan = replace(plan, shares=tuple(shares_of(packs_of(plan.slides, 10), 2)))
    loads = [sum(slide.tiles for pack in share for slide in pack) for share in plan.shares]
    assert loads == [30, 29]
    for rank in (1, 0):
        embed_share(small(), plan, job, rank)
    finish(plan, job, [])
    assert [one["output"] for one in manifest(job)["slides"]] == NAMES
    assert sorted(path.name for path in job.out.iterdir()) == ["manifest.json", *NAMES]


def test_packs_hold_few_tiles_of_one_size(tmp_path):
    paths, job = cohort(tmp_path)
    write_slide(paths[1], 7, patch_size_level0=512)
    slides = plan_cohort(paths, job).slides
    packs = [[slide.tiles for slide in pack] for pack in packs_of(slides, 24)]
    assert sorted(packs) == [[3], [7], [12, 7], [30]]
    assert all(len(pack) == 1 or len(pack) * pack[0] <= 24 for pack in packs)
    assert [7] in packs


@pytest.mark.parametrize("content", ["[]", "{", '{"format": 2}', '{"format": 1, "model": {}, "slides": [{}]}'])
def test_a_file_that_is_no_manifest_is_not_replaced(tmp_path, content):
    paths, job = cohort(tmp_path)
    (job.out / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json (is no manifest|holds a damaged record)"):
        plan_cohort(paths, job)
    assert (job.out / "manifest.json").read_text() == content


def test_squares_lie_where_tiles_do_and_hold_their_weights(tmp_path):
    weights = torch.tensor([0.1, 0.4, 0.1, 0.2])
    coords = torch.tensor([[0, 0], [256, 0], [0, 256], [512, 1024]])
    write_geojson(tmp_path / "a.geojson", weights, coords, 256, 2.0)
    content = json.loads((tmp_path / "a.geojson").read_text())
    features = content["features"]
    assert [content["type"], *{one["type"] for one in features}] == ["FeatureCollection", "Feature"]
    [corners] = features[3]["geometry"]["coordinates"]
    assert corners == [[1024, 2048], [1536, 2048], [1536, 2560], [1024, 2560], [1024, 2048]]
    measured = [one["properties"]["measurements"] for one in features]
    assert [one["attention"] for one in measured] == pytest.approx(weights.tolist())
    assert [one["relative"] for one in measured] == pytest.approx([0.5, 2.0, 0.5, 1.0])
    assert (measured[1]["percentile"], measured[3]["percentile"]) == (75.0, 50.0)


@pytest.mark.parametrize("mean", [False, True])
def test_maps_lie_beside_the_embeddings(tmp_path, mean):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths, job = cohort(tmp_path, heatmaps=True)
    embed(paths[:2], job, global_pool=mean)
    assert sorted(path.name for path in job.out.iterdir()) == sorted(
        [f"s{i}.{end}" for i in (0, 1) for end in ("pt", "png", "geojson")] + ["manifest.json"]
    )
    shapes = json.loads((job.out / "s0.geojson").read_text())["features"]
    right = attention_map(small(), *slide(30, 0), of_tiles=mean)[0].float().mean(dim=0)
    written = [one["properties"]["measurements"]["attention"] for one in shapes]
    assert written == pytest.approx(right.tolist(), rel=1e-5)
    assert (job.out / "s0.png").read_bytes().startswith(b"\x89PNG")
    assert embed(paths[:2], job)[1] == ["s0.pt", "s1.pt"]
    (job.out / "s1.geojson").unlink()
    assert embed(paths[:2], job)[:2] == (["s1.pt"], ["s0.pt"])
    assert (job.out / "s1.geojson").exists()


def test_maps_need_matplotlib_and_pixels_of_the_scan(tmp_path, monkeypatch):
    paths, job = cohort(tmp_path, heatmaps=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"--heatmap needs matplotlib.*pip install 'dilkit\[plot\]'"):
            plan_cohort(paths, job)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("damaged\nat byte 3"), "slide.pt: damaged"),
        (MemoryError(), "slide.pt: memory has no room for its tiles (MemoryError)"),
        (
            RuntimeError("can't allocate memory: 8 bytes"),
            "slide.pt: memory has no room for its tiles (can't allocate memory: 8 bytes)",
        ),
    ],
)
def test_refusals_name_the_fault_of_a_slide(error, reason):
    assert refusal(Path("slide.pt"), error).reason == reason
