"""`dilkit demo --image` on a small picture."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dilkit import Pattern
from dilkit.tools import cli
from dilkit.tools.demo import image
from dilkit.tools.demo.image import ORDERS, FillIn
from dilkit.tools.demo.trainer import judgements, rows_by_name
from dilkit.tools.report import registry


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = dict(GRID=8, PATCH=2, WIDTH=16, LAYERS=1, HEADS=2, PATTERN=Pattern([8, 64], [1, 4]))
    for name, size in sizes.items():
        monkeypatch.setattr(image, name, size)


def a_photo():
    rows, columns = torch.meshgrid(torch.arange(64) / 64, torch.arange(64) / 64, indexing="ij")
    return torch.stack([torch.sin(a * rows + b * columns) for a, b in ((9, 2), (3, 14), (20, 20))], -1)


def test_all_results_are_written(tmp_path, capsys):
    pixels = (120 + 120 * a_photo().numpy() + np.random.default_rng(0).integers(0, 9, (64, 64, 3))).astype(np.uint8)
    Image.fromarray(pixels[10:50]).save(tmp_path / "picture.png")
    out = tmp_path / "out"
    command = ["demo", "--image", str(tmp_path / "picture.png"), "--threads", "1", "--out", str(out), "--steps", "4"]
    assert cli.main([*command, "--seed", "5"]) == 0
    result = registry.read(out / "report.json")
    assert (result.interrupted, [*image.losses(result)]) == (False, [5, 6, 7])
    trainings = rows_by_name(result, "training")
    assert [*trainings] == [f"{order}, seed {seed}" for seed in (5, 6, 7) for order in ORDERS]
    for name, row in trainings.items():
        points = judgements(result, name)
        assert (row.values["steps"], len(row.values["curve"]), len(points)) == (4, 4, 5)
        assert points[-1]["loss"] < points[0]["loss"]
    said = capsys.readouterr().out
    assert (out / "report.png").exists()
    assert all(f"{loss:.4f}" in said for losses in image.losses(result).values() for loss in losses)


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_hidden_is_not_read(order):
    task = FillIn(a_photo(), order, seed=0)
    model, (patches, hidden) = task.model, task.held_out
    torch.nn.init.normal_(model.head.weight)
    changed = torch.where(hidden[..., None], 9.0, patches)
    with torch.no_grad():
        torch.testing.assert_close(model(patches, hidden), model(changed, hidden), rtol=0, atol=0)
        shown = model(patches.flip(0), hidden)
    assert not torch.equal(shown, model(changed, hidden))


def test_the_strip_is_never_trained_on():
    marked = a_photo()
    marked[:, 24:40] = 9
    task = FillIn(marked, ORDERS[0], seed=0)
    assert torch.equal(task.held_out[0], torch.full((4, 64, 12), 9.0))
    assert all(task.draw()[0].max() < 9 for _ in range(200))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "missing.png"], "--image: 'missing.png' cannot be read: "),
        (["--image", "half.png"], "--image: 'half.png' cannot be read: "),
        (["--image", "grey.png"], "--image: 'grey.png' is all of one colour"),
        (["--image", "--text", "a"], "--text: has no meaning with --image"),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (90, 90), 50).save("grey.png")
    Image.effect_noise((90, 90), 50).save("half.png")
    Path("half.png").write_bytes(Path("half.png").read_bytes()[:2000])
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
