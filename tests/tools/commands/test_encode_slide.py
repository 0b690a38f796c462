"""`dilkit encode-slide`."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers.command_line import json_output, output
from helpers.forks import in_child
from helpers.slide_encoder import LENGTHS, SMALL, slide, small

from dilkit.comm import run_threads
from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoderConfig
from dilkit.tools.cli import main, parser_of
from dilkit.tools.commands import encode_processes

HUGE = torch.full((100, 10), 1e39, dtype=torch.float64)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", SlideEncoderConfig(**SMALL, segment_lengths=LENGTHS))
    torch.save({"model": small().state_dict()}, tmp_path / "weights.pth")
    (tmp_path / "slides").mkdir()
    for name, n in (("a", 30), ("b", 7)):
        write(tmp_path / "slides" / f"{name}.pt", n)
    return tmp_path


def write(path, n, **said):
    tiles, coords = slide(n)
    torch.save({"features": tiles[0], "coords": coords[0], **said}, path)


def arguments(files, *more):
    at = ["--checkpoint", str(files / "weights.pth"), "--out", str(files / "out"), "--arch", "tiny", "--dtype", "fp64"]
    return ["encode-slide", str(files / "slides"), *at, "--no-global-pool", *more]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {}),
        (["--tail", "exact", "--global-pool", "--backend", "reference"], dict(tail="exact", global_pool=True)),
        (["--all-layers"], {}),
    ],
)
def test_the_embeddings_are_those_of_the_model(files, capsys, options, settings):
    report = json_output(capsys, *arguments(files, *options))
    assert [Path(one["out"]).name for one in report["slides"]] == ["a.pt", "b.pt"]
    assert [one["tiles"] for one in report["slides"]] == [30, 7]
    assert report["refused"] == []
    model, whole = small(**settings), "--all-layers" in options
    for name, n in (("a", 30), ("b", 7)):
        found = torch.load(files / "out" / f"{name}.pt", weights_only=True)
        with torch.no_grad():
            right = torch.cat(model(*slide(n), all_layer_embed=whole)).float()
        assert torch.allclose(found["layers"] if whole else found["embedding"][None], right, atol=1e-6)


def test_what_a_checkpoint_stores_holds(files, capsys):
    """`finetune-slide` stores sizes that no architecture has, pooling, and the tile encoder."""
    stored = dict(SMALL, num_heads=2, segment_lengths=(4, 8, 16), global_pool=True, tail="exact", tile_encoder="uni_v2")
    torch.save({"model": small().state_dict(), **stored}, files / "weights.pth")
    write(files / "slides" / "a.pt", 30, encoder="uni_v2")
    command = [one for one in arguments(files) if one not in ("--arch", "tiny", "--no-global-pool")]
    assert json_output(capsys, *command)["pooling"] == "mean of tiles"
    del stored["tile_encoder"]
    with torch.no_grad():
        right = small(**stored)(*slide(30))[0][0].float()
    assert torch.allclose(embedding(files, "a"), right, atol=1e-6)
    for option in (["--no-global-pool"], ["--tail", "zeros"], ["--arch", "tiny"], ["--tile-encoder", "gigapath"]):
        assert main([*command, *option]) == 2
        assert re.search("contradicts checkpoint .* trained with|was trained on features of 'uni_v2'", capsys.readouterr().err)


def embedding(files, name):
    return torch.load(files / "out" / f"{name}.pt", weights_only=True)["embedding"]


@pytest.mark.parametrize(
    ("said", "options", "text"),
    [
        ({}, [], "most neighbours are 512 pixels apart, and neither the file nor --tile-size says how large tiles are"),
        (dict(patch_size_level0=512), ["--tile-size", "256"], "512 pixels a side, as the file says, but --tile-size says 256"),
        (dict(encoder="uni_v2", patch_size_level0=512), [], "features are of 'uni_v2', not of 'gigapath'"),
        (dict(unit="um"), ["--tile-size", "512"], "coords are in unit='um'"),
        (dict(features=HUGE, patch_size_level0=512), ["--dtype", "fp32"], "float32 is not finite"),
        (dict(features=torch.zeros(100, 11)), ["--tile-size", "512"], "tiles have 11 features, and the model takes 10"),
    ],
)
def test_what_a_file_leaves_open_or_says_otherwise_is_refused(files, capsys, said, options, text):
    coords = 512 * torch.cartesian_prod(torch.arange(10), torch.arange(10))
    torch.save({"features": torch.randn(100, 10), "coords": coords, **said}, files / "slides" / "a.pt")
    (files / "slides" / "b.pt").unlink()
    assert main(arguments(files, *options)) == 1
    assert text in capsys.readouterr().err
    assert not any((files / "out").glob("*.pt"))
    ways_out = ["--tile-size", "512", "--tile-encoder", "uni", "--dtype", "fp64"]
    assert main(arguments(files, *ways_out)) == (1 if "11 features" in text or said.get("unit") else 0)


def test_embeddings_replace_nothing_but_embeddings(files, capsys):
    (files / "out").mkdir()
    write(files / "out" / "a.pt", 3)
    assert main(arguments(files)) == 1
    assert "a.pt exists and is no embedding; choose another --out" in capsys.readouterr().err
    assert set(torch.load(files / "out" / "a.pt", weights_only=True)) == {"features", "coords"}
    assert main(arguments(files, "--out", str(files / "slides"))) == 2
    assert "slides is the folder of the features themselves; name another, such as" in capsys.readouterr().err
    write(files / "a.pt", 3)
    command = arguments(files)
    assert main([command[0], str(files / "a.pt"), *command[1:]]) == 2
    assert "several files would have the name a.pt" in capsys.readouterr().err
    assert [path.name for path in sorted((files / "slides").iterdir())] == ["a.pt", "b.pt"]


def test_a_command_that_does_not_go_through_leaves_nothing(files, capsys, monkeypatch):
    def interrupted(content, file):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", interrupted)
        assert main(arguments(files)) == 130
    torch.save({"model": {"norm.weight": torch.zeros(7)}}, files / "weights.pth")
    capsys.readouterr()
    assert main(arguments(files)) == 2
    assert "1 of another shape: norm.weight (7,) instead of (48,)" in capsys.readouterr().err
    assert not any((files / "out").iterdir())


def test_ranks_of_a_launcher_share_the_slides(files, capsys):
    """In place of two processes, two threads; the plan and the outcomes travel as between two."""
    for name in "cdefgh":
        write(files / "slides" / f"{name}.pt", 7)
    args = parser_of("encode-slide").parse_args(arguments(files, "--json")[1:])
    paths = sorted((files / "slides").iterdir())
    job = encode_processes.job_of(args)
    assert run_threads(2, lambda comm: encode_processes.encode(args, *job, paths, [], comm)) == [0, 0]
    assert [one["tiles"] for one in json.loads(capsys.readouterr().out)["slides"]] == [30, *[7] * 7]
    again = json_output(capsys, *arguments(files))
    assert all(one["kept"] for one in again["slides"])


def test_the_tile_size_is_the_file_s_or_the_option_s(files, capsys):
    tiles, coords = slide(30)
    torch.save({"features": tiles[0], "coords": 2 * coords[0], "patch_size_level0": 512}, files / "slides" / "a.pt")
    report = json_output(capsys, *arguments(files))
    assert [(one["tile_size"], one["tile_size_from"]) for one in report["slides"]] == [(512, "file"), (256, "default")]
    with torch.no_grad():
        right = small()(tiles, coords)[0][0].float()
    assert torch.allclose(embedding(files, "a"), right, atol=1e-6)
    torch.save({"features": tiles[0], "coords": 2 * coords[0]}, files / "slides" / "a.pt")
    printed = output(capsys, *arguments(files, "--tile-size", "512", "--ngrids", "40"))
    assert "wrote 2 embeddings" in printed
    assert printed.count("512 (--tile-size)") == 2
    assert torch.allclose(embedding(files, "a"), right, atol=1e-6)


def test_what_is_doubtful_is_said(files, capsys):
    tiles, coords = (torch.cat(2 * [x[0]]) for x in slide(10))
    torch.save({"features": tiles, "coords": coords}, files / "slides" / "b.pt")
    (files / "slides" / "c.hdf5").write_bytes(b"")
    (files / "slides" / "._a.h5").write_bytes(b"of macOS")
    report = json_output(capsys, *[one for one in arguments(files) if one != "--no-global-pool"])
    assert report["pooling"] == "class token"
    assert [Path(path).name for path in report["not_read"]] == ["c.hdf5"]
    assert [len(one["warnings"]) for one in report["slides"]] == [0, 1]
    assert main([one for one in arguments(files) if one != "--no-global-pool"]) == 0
    pooling, unread, twice = capsys.readouterr().err.splitlines()
    assert "pooled, which GigaPath's pretraining did not train; --global-pool takes the mean" in pooling
    assert "c.hdf5 is no file of features, and is not read" in unread
    assert "b.pt: coords: 20 of 20 tiles share a cell" in twice


@pytest.mark.skipif(sys.platform != "linux", reason="a process is forked that has loaded torch")
@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_no_matter(files, closed):
    def run():
        torch.set_num_threads(1)
        for number in closed:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        assert main(arguments(files)) == 0
        assert all(os.get_inheritable(number) for number in closed)  # not closed, nor one of the files that were read

    assert in_child(run) == "done"
    assert [path.name for path in sorted((files / "out").iterdir())] == ["a.pt", "b.pt", "manifest.json"]
