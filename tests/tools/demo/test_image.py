"""`dilkit demo --image` from end to end on a small picture, and what it says to input that will not do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dilkit import Pattern
from dilkit.tools import cli
from dilkit.tools.demo.image import model
from dilkit.tools.demo.image.model import ImageConfig, PatchTransformer
from dilkit.tools.demo.image.photo import MASKS, SIDE, Crops
from dilkit.tools.demo.image.record import ORDERS, ImageDemoResult
from dilkit.tools.demo.image.task import FillIn
from dilkit.tools.demo.text.record import Budget
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report import registry

SMALL = ImageConfig(grid=8, patch=2, width=16, layers=1, heads=2, pattern=Pattern([8, 64], [1, 4]))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "ImageConfig", lambda: SMALL)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    rows, columns = np.mgrid[:40, :70]
    pixels = np.stack([4 * columns % 256, 6 * rows % 256, 200 * (rows // 8 + columns // 8) % 256], -1)
    Image.fromarray((pixels + np.random.default_rng(0).integers(0, 9, pixels.shape)).clip(0, 255).astype(np.uint8)).save(path)
    return path


def demo(picture: Path, out: Path, *more: str) -> int:
    """A run of four steps of each model."""
    return cli.main(["demo", "--image", str(picture), "--threads", "1", "--out", str(out), "--steps", "4", *more])


def a_photo() -> torch.Tensor:
    """64 x 64 pixels of waves."""
    rows, columns = torch.meshgrid(torch.arange(64) / 64, torch.arange(64) / 64, indexing="ij")
    return 0.5 + 0.5 * torch.stack([torch.sin(a * rows + b * columns) for a, b in ((9, 2), (3, 14), (20, 20))], -1)


def test_all_results_are_written(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(picture, tmp_path, "--seed", "5") == 0
    found = registry.read(tmp_path / "report.json")
    assert isinstance(found, ImageDemoResult)
    assert (found.interrupted, [*found.losses()]) == (None, [5, 6, 7])
    assert [(one.seed, one.order) for one in found.trainings] == [(seed, order) for seed in (5, 6, 7) for order in ORDERS]
    for one in found.trainings:
        assert (one.steps, len(one.train_curve), len(one.points)) == (4, 4, 5)
        assert one.points[-1].held_out < one.points[0].held_out
    said = capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == {"report.png", "reconstruction.png"}
    for losses in found.losses().values():
        assert all(f"{loss:.4f}" in said for loss in losses)


def course(config: ImageConfig, order: str, seed: int) -> list[float]:
    """All losses of a training."""
    trainer = Trainer(FillIn(Crops(a_photo(), config), order, seed), Budget(steps=12))
    trainer.run(4, lambda: None, lambda: None)
    return [loss for *_, loss in trainer.curve] + [point.held_out for point in trainer.points]


def test_under_a_dense_pattern_both_orders_learn_the_same() -> None:
    """The order is all that differs, and it does not matter where everybody sees everything."""
    dense = ImageConfig(grid=8, patch=2, width=16, layers=2, heads=2, pattern=Pattern.dense())
    first, second = (course(dense, order, seed=0) for order in ORDERS)
    assert first == pytest.approx(second, rel=1e-4)
    sparse = ImageConfig(grid=8, patch=2, width=16, layers=2, heads=2, pattern=SMALL.pattern)
    first, second = (course(sparse, order, seed=0) for order in ORDERS)
    assert first[0] == pytest.approx(second[0], rel=1e-4), "both begin with the mean of what is visible"
    assert first[-1] != pytest.approx(second[-1], rel=1e-3)
    assert course(SMALL, "hilbert", 1) == course(SMALL, "hilbert", 1) != course(SMALL, "hilbert", 2)


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


def test_the_strip_is_never_trained_on_and_crops_come_from_both_sides_as_far_as_they_reach() -> None:
    marked = a_photo()
    marked[:, 24:40] = 9
    crops, generator = Crops(marked, SMALL), torch.Generator().manual_seed(0)
    nine = (9 - crops.mean) / crops.deviation
    assert torch.equal(crops.held_out, nine.repeat(4).expand(SIDE * MASKS, 64, 12))
    assert all(crops.batch(generator)[0].max() < nine.min() for _ in range(200))
    crops = Crops(torch.arange(64.0).expand(64, 64)[..., None].expand(-1, -1, 3), SMALL)
    found = [crops._random_crop(generator) * crops.deviation + crops.mean for _ in range(400)]
    assert {round(crop.min().item()) for crop in found} == {*range(24 - 16 + 1), *range(40, 64 - 16 + 1)}
    assert all(round((crop.max() - crop.min()).item()) == 15 for crop in found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "missing.png"], "--image: 'missing.png' is no picture that Pillow can read: FileNotFoundError: "),
        (["--image", "text.png"], "--image: 'text.png' is no picture that Pillow can read: UnidentifiedImageError: "),
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
    Path("text.png").write_text("no picture")
    Image.new("RGB", (60, 30)).save("grey.png")
    Image.effect_noise((90, 90), 50).save("half.png")
    Path("half.png").write_bytes(Path("half.png").read_bytes()[:2000])
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
