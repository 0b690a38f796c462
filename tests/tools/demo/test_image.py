"""`dilkit demo --image` from end to end on a small picture, and what it says to input that will not do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dilkit import Pattern
from dilkit.tools import cli
from dilkit.tools.demo.image import model
from dilkit.tools.demo.image.model import ImageConfig, PatchTransformer
from dilkit.tools.demo.image.photo import SAMPLE, Photograph, load_photograph, to_patches, to_pixels
from dilkit.tools.demo.image.sight import PatternSight
from dilkit.tools.demo.image.task import GUESSES, JUDGEMENTS, MASKS, RECIPE, Crops, PairTask, guess_loss
from dilkit.tools.demo.trainer import Trainer
from dilkit.tools.report import registry
from dilkit.tools.report.kinds import demo_image
from dilkit.tools.results.kinds.demo import Budget
from dilkit.tools.results.kinds.demo_image import CURVES, Judgement, Outcome, PairTraining

SMALL = ImageConfig(grid=8, patch=2, width=16, layers=1, heads=2, pattern=Pattern([8, 64], [1, 4]))
PICTURES = {"loss.png", "reconstruction.png", "sight.png"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small model, and the number of threads put back: --threads is for the whole process."""
    monkeypatch.setattr(model, "ImageConfig", lambda: SMALL)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib's figures there are no pictures, which take most of a small run's time."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture of 70 x 40 pixels with slopes, edges and some noise."""
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    rows, columns = np.mgrid[:40, :70]
    pixels = np.stack([4 * columns % 256, 6 * rows % 256, 200 * (rows // 8 + columns // 8) % 256], -1)
    Image.fromarray((pixels + np.random.default_rng(0).integers(0, 9, pixels.shape)).clip(0, 255).astype(np.uint8)).save(path)
    return path


def demo(picture: Path, out: Path, *more: str) -> int:
    """A run of four steps of each model."""
    return cli.main(["demo", "--image", str(picture), "--steps", "4", "--threads", "1", "--out", str(out), *more])


def a_photo() -> Photograph:
    """40 x 70 pixels of waves."""
    rows, columns = torch.meshgrid(torch.arange(40) / 40, torch.arange(70) / 70, indexing="ij")
    waves = [torch.sin(a * rows + b * columns) for a, b in ((9, 2), (3, 14), (20, 20))]
    return Photograph("waves", 0.5 + 0.5 * torch.stack(waves, -1), SMALL.crop)


def test_all_results_are_written(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(picture, tmp_path / "new", "--seed", "5") == 0
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (report["schema"], report["kind"], report["interrupted"]) == (1, "demo-image", None)
    assert report["backend"]["picked"]
    assert [twins["seed"] for twins in report["training"]["twins"]] == report["outcome"]["seeds"] == [5, 6, 7]
    for twins in report["training"]["twins"]:
        assert [point["step"] for point in twins["points"]] == [0, 1, 2, 3, 4]
        assert twins["finished"]
        for curve in CURVES:
            assert len(twins["train"][curve]) == 4
            assert twins["points"][-1]["held_out"][curve] < twins["points"][0]["held_out"][curve]
            assert twins["seconds"][curve] > 0
    markdown, said = (tmp_path / "new" / "report.md").read_text(), capsys.readouterr().out
    assert {path.name for path in (tmp_path / "new").glob("*.png")} == PICTURES
    assert all(f"({name})" in markdown for name in PICTURES)
    for name, median in report["outcome"]["medians"].items():
        assert f"{'Hilbert' if name == 'hilbert' else name} {median:.4f}" in said
        assert f"{median:.4f} |" in markdown
    assert all(f"| {guess['loss']:.4f} | {guess['decibels']:.2f} |" in markdown for guess in report["baselines"].values())
    kind, found = registry.read(tmp_path / "new" / "report.json")
    (plot,) = kind.document(found).plots
    assert [series.name for series in plot.series[:2]] == ["row-major", "Hilbert"]
    assert "Held-out loss" in kind.sentence(found)


@pytest.mark.usefixtures("undrawn")
def test_json_is_all_that_is_printed(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(picture, tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "report.json").read_text())


@pytest.mark.usefixtures("undrawn")
def test_minutes_become_steps(picture: Path, tmp_path: Path) -> None:
    arguments = ["demo", "--image", str(picture), "--minutes", "0.004", "--threads", "1", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    training = json.loads((tmp_path / "report.json").read_text())["training"]
    assert training["steps"] >= 4
    assert {twins["steps"] for twins in training["twins"]} == {training["steps"]}


def course(config: ImageConfig, seed: int, steps: int = 12) -> dict[str, list[float]]:
    """All losses of a training, by order."""
    crops = Crops(a_photo(), config)
    trainer = Trainer(PairTask(crops, seed), Budget(steps=steps), RECIPE)
    trainer.run(JUDGEMENTS, lambda: None, lambda: None)
    return {curve: [point.loss[curve] for point in trainer.train + trainer.held_out] for curve in CURVES}


def test_under_a_dense_pattern_both_orders_learn_the_same() -> None:
    """The order is all that differs, and it does not matter where everybody sees everything."""
    dense = ImageConfig(grid=8, patch=2, width=16, layers=2, heads=2, pattern=Pattern.dense())
    losses = course(dense, seed=0)
    assert losses["row-major"] == pytest.approx(losses["hilbert"], rel=1e-4)
    sparse = course(ImageConfig(grid=8, patch=2, width=16, layers=2, heads=2, pattern=SMALL.pattern), seed=0)
    assert sparse["row-major"][0] == pytest.approx(sparse["hilbert"][0], rel=1e-4), "both begin with the mean colour"
    assert sparse["row-major"][-1] != pytest.approx(sparse["hilbert"][-1], rel=1e-3)


def test_same_seed_gives_the_same_course() -> None:
    assert course(SMALL, 1) == course(SMALL, 1) != course(SMALL, 2)


@pytest.mark.parametrize("curve", CURVES)
def test_what_is_hidden_is_not_read(curve: str) -> None:
    torch.manual_seed(0)
    model, task = PatchTransformer(SMALL, SMALL.order(curve)), Crops(a_photo(), SMALL)
    torch.nn.init.normal_(model.head.weight)
    changed = torch.where(task.hidden[..., None], 9.0, task.held_out)
    with torch.no_grad():
        torch.testing.assert_close(model(task.held_out, task.hidden), model(changed, task.hidden), rtol=0, atol=0)
        shown = model(task.held_out.flip(0), task.hidden)
    assert not torch.equal(shown, model(changed, task.hidden))


def test_the_strip_is_never_trained_on() -> None:
    photo = a_photo()
    (start, stop), (top, bottom) = photo.strip, photo.held_out_rows
    assert (stop - start, bottom - top) == (16, 32)
    marked = torch.zeros(40, 70, 3)
    marked[:, start:stop] = 1
    photo = Photograph("marked", marked, SMALL.crop)
    generator = torch.Generator().manual_seed(0)
    assert all(photo.random_crop(generator).sum() == 0 for _ in range(200))
    assert photo.train_pixels().sum() == 0
    assert len(photo.train_pixels()) == 40 * 54
    assert torch.equal(photo.held_out_crops(), torch.ones(2, 16, 16, 3))


def test_crops_come_from_both_sides_as_far_as_they_reach() -> None:
    places = torch.arange(70.0).expand(40, 70)[..., None].expand(-1, -1, 3)
    photo = Photograph("columns", places, SMALL.crop)
    generator = torch.Generator().manual_seed(0)
    crops = [photo.random_crop(generator) for _ in range(400)]
    assert {int(crop.min()) for crop in crops} == {*range(27 - 16 + 1), *range(43, 70 - 16 + 1)}
    assert all(crop.max() - crop.min() == 15 for crop in crops)


def test_patches_and_pixels() -> None:
    crops = torch.rand(3, 16, 16, 3)
    patches = to_patches(crops, 2)
    assert patches.shape == (3, 64, 12)
    assert torch.equal(patches[1, 8 * 2 + 5], crops[1, 4:6, 10:12].flatten())
    assert torch.equal(to_pixels(patches, 2), crops)


def test_as_many_patches_are_hidden_in_every_crop() -> None:
    task = Crops(a_photo(), SMALL)
    assert task.held_out.shape == (2 * MASKS, 64, 12)
    assert task.hidden.sum(1).tolist() == [48] * 2 * MASKS
    assert len({tuple(one.tolist()) for one in task.hidden}) == 2 * MASKS
    torch.testing.assert_close(task.pixels(task.held_out[:2]), task.photo.held_out_crops())


def test_guesses() -> None:
    """Three patches in a row of a grid of 2 x 2 are known: (0, 0) is 0, (0, 1) is 1, (1, 0) is 5; (1, 1) is 4."""
    patches, hidden = torch.tensor([[[0.0], [1.0], [5.0], [4.0]]]), torch.tensor([[False, False, False, True]])
    weighted = (0 / 4 + 1 + 5) / (2 + 1 / 4)
    expected = dict(mean=(4 - 2) ** 2, nearest=(4 - 3) ** 2, weighted=(4 - weighted) ** 2)
    assert {
        name: guess_loss(weigh, patches, hidden, ImageConfig(grid=2).places) for name, weigh in GUESSES.items()
    } == pytest.approx(expected)


def training(seed: int, finished: bool, *points: tuple[float, float]) -> PairTraining:
    judged = tuple(Judgement(step, dict(zip(CURVES, losses, strict=True))) for step, losses in enumerate(points))
    return PairTraining(seed=seed, steps=0, finished=finished, points=judged, train={}, seconds={})


@pytest.mark.parametrize(
    ("losses", "median", "spread", "stands_out", "said"),
    [
        ([(0.5, 0.3), (0.6, 0.3), (0.5, 0.4)], -0.2, 0.1, True, "Hilbert order is better for every seed, by 0.2000"),
        ([(0.3, 0.5), (0.3, 0.6), (0.4, 0.5)], 0.2, 0.1, True, "row-major order is better for every seed, by 0.2000"),
        ([(0.5, 0.3), (0.8, 0.6), (0.5, 0.3)], -0.2, 0.3, False, "does not exceed the spread over seeds, 0.3000"),
        ([(0.5, 0.3), (0.5, 0.51), (0.5, 0.3)], -0.2, 0.21, False, "Which is better depends on the seed"),
        ([(0.5, 0.1)], -0.4, 0.0, False, "One seed says nothing"),
    ],
    ids=["hilbert", "row-major", "spread", "sign", "one-seed"],
)
def test_outcome(losses: list[tuple[float, float]], median: float, spread: float, stands_out: bool, said: str) -> None:
    trainings = [training(seed, True, pair) for seed, pair in enumerate(losses)]
    found = Outcome.of([*trainings, training(9, False)], lambda loss: -loss)
    assert found is not None
    assert said in demo_image.outcome(found)
    assert (found.median_difference, found.spread) == (pytest.approx(median), pytest.approx(spread))
    assert found.stands_out is stands_out
    assert found.seeds == tuple(range(len(losses)))


def test_no_outcome_without_a_finished_training() -> None:
    assert Outcome.of([training(0, False)], lambda loss: loss) is None


def test_sight() -> None:
    """Of segments of 8 tokens, row-major order sees a row, Hilbert order half of a block of 4 x 4."""
    sight = PatternSight(SMALL)
    for query in sight.queries.values():
        seen = {curve: sight.of(query, curve) for curve in CURVES}
        assert seen["row-major"].sum() == seen["hilbert"].sum() == 8 + 16
        assert int(seen["hilbert"].flatten()[query]) == 2
        row = query // SMALL.grid
        assert bool((seen["row-major"][row] > 0).all())
    assert sight.neighbours_seen("row-major", 1) < sight.neighbours_seen("hilbert", 1) < 1


def test_interrupted_before_anything_was_judged(picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PairTask, "judge", interrupt)
    assert demo(picture, tmp_path) == 130
    assert json.loads((tmp_path / "report.json").read_text())["outcome"] is None
    assert "No seed was trained to its end" in (tmp_path / "report.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {"sight.png"}


@pytest.mark.parametrize("steps_before", [0, 6])
def test_interrupted_run_reports_what_there_is(
    picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps_before: int
) -> None:
    original, done = Trainer.step, []

    def interrupt(self: Trainer) -> None:
        if len(done) == steps_before:
            raise KeyboardInterrupt
        done.append(1)
        original(self)

    monkeypatch.setattr(Trainer, "step", interrupt)
    (tmp_path / "loss.png").write_text("an earlier one")
    assert demo(picture, tmp_path) == 130
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"] == "training"
    finished = [twins["finished"] for twins in report["training"]["twins"]]
    assert finished == ([False] if steps_before == 0 else [True, False])
    assert (report["outcome"] is None) == (steps_before == 0)
    assert "INTERRUPTED while training" in (tmp_path / "report.md").read_text()
    assert "interrupted while training" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("undrawn")
def test_missing_matplotlib_is_said(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(picture, tmp_path) == 0
    assert "no pictures: import of matplotlib.figure halted" in capsys.readouterr().out
    assert ".png)" not in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.glob("*.png"))


def test_the_sample_is_a_photograph() -> None:
    photo = load_photograph(None, ImageConfig().crop)
    assert photo.source == SAMPLE
    assert photo.pixels.shape == (600, 512, 3)
    assert 0.2 < photo.pixels.std() < 0.5


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "CMYK", "I;16", "F"])
def test_pictures_of_other_kinds(tmp_path: Path, mode: str) -> None:
    """All are read, and have light and dark as the picture has."""
    slope = np.broadcast_to(np.arange(60) * 4, (30, 60)).astype(np.uint8)
    path = tmp_path / ("picture.tif" if mode in ("CMYK", "F") else "picture.png")
    if mode == "I;16":
        Image.fromarray(slope.astype(np.uint16) * 257).save(path)
    else:
        Image.fromarray(slope).convert(mode).save(path)
    pixels = load_photograph(str(path), 16).pixels
    assert pixels.shape == (30, 60, 3)
    assert pixels[:, :10].mean() < 0.1
    assert pixels[:, 20:40].mean() == pytest.approx(0.46, abs=0.1)
    assert pixels[:, 50:].mean() > 0.8


def test_what_is_clear_is_white_and_what_is_turned_is_upright(tmp_path: Path) -> None:
    picture = Image.effect_noise((60, 30), 90).convert("RGBA")
    picture.paste((0, 0, 0, 0), (0, 0, 10, 10))
    picture.save(tmp_path / "clear.png")
    assert load_photograph(str(tmp_path / "clear.png"), 16).pixels[:10, :10].min() == 1
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((30, 60), 90).save(tmp_path / "turned.jpg", exif=exif)
    assert load_photograph(str(tmp_path / "turned.jpg"), 16).pixels.shape == (30, 60, 3)


@pytest.mark.parametrize(
    ("size", "reduced"), [((1280, 640), (640, 320)), ((1600, 32), (800, 16)), ((96, 2000), (48, 1000))], ids=str
)
def test_large_pictures_are_reduced(tmp_path: Path, size: tuple[int, int], reduced: tuple[int, int]) -> None:
    Image.effect_noise(size, 200).save(tmp_path / "large.png")
    assert load_photograph(str(tmp_path / "large.png"), 16).pixels.shape == (*reduced[::-1], 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "missing.png"], "--image: 'missing.png' cannot be read: No such file or directory"),
        (["--image", ""], "--image: '' cannot be read: No such file or directory"),
        (["--image", "folder"], "--image: 'folder' cannot be read: Is a directory"),
        (["--image", "text.png"], "--image: 'text.png' is no picture that Pillow can open"),
        (["--image", "half.png"], "--image: 'half.png' cannot be read: "),
        (["--image", "grey.png"], "--image: the strip down its middle of grey.png is all of one colour"),
        (["--image", "small.png"], "--image: small.png has 47 x 16 pixels; at least 48 x 16 are needed"),
        (["--image", "--text", "a"], "--text: has no meaning with --image"),
        (["--image", "--context", "128"], "--context: has no meaning with --image"),
        (["--image", "--save", "m.pt"], "--save: has no meaning with --image"),
        (["--image", "--comm", "threads"], "--comm: has no meaning with --image"),
        (["--image", "--world-size", "2"], "--world-size: has no meaning with --image"),
        (["--image", "--sample", "x"], "--sample: has no meaning with --image"),
        (["--image", "--bytes", "4"], "--bytes: has no meaning without --sample"),
        (["--seeds", "4"], "--seeds: has no meaning without --image"),
        (["--sample", "x", "--seeds", "4"], "--seeds: has no meaning without --image"),
        (["--image", "--seeds", "2"], "--seeds: '2' is not a whole number of 3 or more"),
        (["--image", "--seed", str(2**63 - 2)], f"--seed: {2**63 - 2} is too large; at most {2**63 - 3} with --seeds 3"),
        (["--image", "--steps", "1", "--minutes", "1"], "not allowed with"),
        (["--image", "--out", "text.png"], "--out: folder 'text.png' cannot be made"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text.png").write_text("no picture")
    Image.new("RGB", (47, 16)).save("small.png")
    Image.new("RGB", (60, 30)).save("grey.png")
    Image.effect_noise((90, 90), 50).save("half.png")
    Path("half.png").write_bytes(Path("half.png").read_bytes()[:2000])
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("PIL.Image", ["--image"], "--image: pictures are read by Pillow (pip install 'dilkit[plot]')"),
        ("matplotlib.cbook", ["--image"], "--image: the sample comes with matplotlib (pip install 'dilkit[plot]')"),
    ],
)
def test_missing_packages_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    arguments: Sequence[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_processes_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert cli.main(["demo", "--image"]) == 2
    assert "--image: trains in one process; start it without torchrun" in capsys.readouterr().err
