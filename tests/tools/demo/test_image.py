"""`dilkit demo --image` from end to end on a small picture; its data, and what it says to unusable input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dilkit import Pattern
from dilkit.tools import cli
from dilkit.tools.demo import image
from dilkit.tools.demo.image import MASKS, ORDERS, SIDE, Crops, FillIn, ImageConfig, PatchTransformer
from dilkit.tools.demo.trainer import Trainer, judgements, rows_by_name
from dilkit.tools.report import registry
from dilkit.tools.results.rows import RowsResult

SMALL = ImageConfig(grid=8, patch=2, width=16, layers=1, heads=2, pattern=Pattern([8, 64], [1, 4]))


def a_photo() -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(64) / 64, torch.arange(64) / 64, indexing="ij")
    return 0.5 + 0.5 * torch.stack([torch.sin(a * rows + b * columns) for a, b in ((9, 2), (3, 14), (20, 20))], -1)


def test_all_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(image, "ImageConfig", lambda: SMALL)
    pixels = (a_photo().numpy() * 240 + np.random.default_rng(0).integers(0, 9, (64, 64, 3))).astype(np.uint8)
    Image.fromarray(pixels[10:50]).save(tmp_path / "picture.png")
    out = tmp_path / "out"
    command = ["demo", "--image", str(tmp_path / "picture.png"), "--threads", "1", "--out", str(out), "--steps", "4"]
    assert cli.main([*command, "--seed", "5"]) == 0
    result = registry.read(out / "report.json")
    assert isinstance(result, RowsResult)
    assert (result.interrupted, [*image.losses(result)]) == (False, [5, 6, 7])
    trainings = rows_by_name(result, "training")
    assert [(row.values["seed"], row.values["order"]) for row in trainings.values()] == [
        (i, x) for i in (5, 6, 7) for x in ORDERS
    ]
    for name, row in trainings.items():
        points = judgements(result, name)
        assert (row.values["steps"], len(row.values["curve"]), len(points)) == (4, 4, 5)
        assert points[-1]["loss"] < points[0]["loss"]
    said = capsys.readouterr().out
    assert {path.name for path in out.glob("*.png")} == {"report.png", "reconstruction.png"}
    assert all(f"{loss:.4f}" in said for losses in image.losses(result).values() for loss in losses)


def course(config: ImageConfig, order: str, seed: int) -> list[float]:
    trainer = Trainer(FillIn(Crops(a_photo(), config), order, seed), steps=12)
    trainer.run(4, lambda: None, lambda: None)
    return [loss for *_, loss in trainer.curve] + [point["loss"] for point in trainer.points]


def test_under_a_dense_pattern_both_orders_learn_the_same() -> None:
    """The order is all that differs, and it does not matter where everybody sees everything."""
    dense = ImageConfig(grid=8, patch=2, width=16, layers=2, heads=2, pattern=Pattern.dense())
    first, second = (course(dense, order, seed=0) for order in ORDERS)
    assert first == pytest.approx(second, rel=1e-4)
    first, second = (course(SMALL, order, seed=0) for order in ORDERS)
    assert first[0] == pytest.approx(second[0], rel=1e-4), "both begin with the mean of what is visible"
    assert first[-1] != pytest.approx(second[-1], rel=1e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_hidden_is_not_read(order: str) -> None:
    torch.manual_seed(0)
    model, crops = PatchTransformer(SMALL, order), Crops(a_photo(), SMALL)
    torch.nn.init.normal_(model.head.weight)
    changed = torch.where(crops.hidden[..., None], 9.0, crops.held_out)
    with torch.no_grad():
        torch.testing.assert_close(model(crops.held_out, crops.hidden), model(changed, crops.hidden), rtol=0, atol=0)
        shown = model(crops.held_out.flip(0), crops.hidden)
    assert not torch.equal(shown, model(changed, crops.hidden))


def test_the_strip_is_never_trained_on() -> None:
    marked = a_photo()
    marked[:, 24:40] = 9
    crops, generator = Crops(marked, SMALL), torch.Generator().manual_seed(0)
    nine = (9 - crops.mean) / crops.deviation
    assert torch.equal(crops.held_out, nine.repeat(4).expand(SIDE * MASKS, 64, 12))
    assert all(crops.batch(generator)[0].max() < nine.min() for _ in range(200))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "missing.png"], "--image: 'missing.png' is no picture that Pillow can read: FileNotFoundError: "),
        (["--image", "half.png"], "--image: 'half.png' is no picture that Pillow can read: "),
        (["--image", "grey.png"], "--image: the picture is all of one colour beside its middle"),
        (["--image", "--text", "a"], "--text: has no meaning with --image"),
        (["--image", "--seeds", "2"], "--seeds: '2' is not a whole number of 3 or more"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (60, 30)).save("grey.png")
    Image.effect_noise((90, 90), 50).save("half.png")
    Path("half.png").write_bytes(Path("half.png").read_bytes()[:2000])
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
