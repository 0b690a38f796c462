"""`dilkit demo` on a small text."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from dilkit.tools import cli
from dilkit.tools.demo import text
from dilkit.tools.demo.corpus import Corpus, load_text
from dilkit.tools.demo.trainer import Trainer, judgements, rows_by_name
from dilkit.tools.demo.transformer import ByteTransformer, ModelConfig, load_model, sample_bytes, save_model
from dilkit.tools.report import registry

CONTEXT = 256


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        (folder / f"file{i}.txt").write_text("".join(f"line {j} of file {i}: {i * j}\n" for j in range(40)))
    (folder / "copy.txt").write_bytes((folder / "file3.txt").read_bytes())
    (folder / "empty.txt").touch()
    (folder / "image.bin").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("hidden")
    return folder


def train(corpus, out, *more):
    steps = ["--context", str(CONTEXT), "--steps", "3", "--threads", "1"]
    return cli.main(["demo", "--text", str(corpus), *steps, "--out", str(out), *more])


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as printed:
        patched.setattr(text, "SAMPLES", 1)
        assert train(corpus, out, "--json") == 0
    return out, printed.getvalue()


@pytest.fixture
def trained(run):
    return run[0]


def read(out):
    return registry.read(out / "report.json")


def test_all_results_are_written(run, trained):
    assert json.loads(run[1]) == json.loads((trained / "report.json").read_text())
    result = read(trained)
    assert (result.schema, result.interrupted, result.facts["context"]) == (2, False, CONTEXT)
    assert "picked" in {row.verdict for row in rows_by_name(result, "backends").values()}
    training, points = rows_by_name(result, "training")["text"].values, judgements(result, "text")
    assert (training["steps"], training["tokens"], len(training["curve"])) == (3, 3 * CONTEXT, 3)
    before, after = points[0]["loss"], points[-1]["loss"]
    assert after < before == pytest.approx(8, abs=0.5)
    assert [case.case["tokens"] for case in result.cases("lengths")] == [64, 128, 256, 512, 1024]
    assert all(case.timed(text.DILATED, text.DENSE) for case in result.cases("lengths"))
    assert f"{before:.2f} -\\> {after:.2f} bits per byte" in (trained / "report.md").read_text()
    assert (trained / "report.png").read_bytes().startswith(b"\x89PNG")
    assert load_model(trained / "model.pt").config.context == CONTEXT


def test_held_out_files_are_never_trained_on(corpus):
    loaded = load_text([str(corpus)], CONTEXT)
    held_out = loaded.facts["held_out_files"]
    assert held_out
    assert loaded.facts["train_files"] + len(held_out) == 12, "the copy, hidden, empty and binary files do not count"
    for name in held_out:
        assert Path(name).read_bytes() in loaded.held_out
        assert Path(name).read_bytes() not in loaded.train
    assert loaded == load_text([str(corpus)], CONTEXT)
    windows = Corpus(b"", bytes(range(200)), {}).held_out_windows(64)
    assert [int(window[0]) for window in windows] == [0, 67, 135], "they do not overlap"


@pytest.mark.parametrize("when", ["training", "measuring"])
@pytest.mark.usefixtures("without_pictures")
def test_interrupted_run_reports_what_there_is(corpus, tmp_path, monkeypatch, capsys, when):
    def interrupt(*arguments):
        calls.append(1)
        if len(calls) == (3 if when == "training" else 2):
            raise KeyboardInterrupt
        return original(*arguments)

    owner = Trainer if when == "training" else text
    name, calls = ("step" if when == "training" else "time_attention"), list[int]()
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, interrupt)
    assert train(corpus, tmp_path) == 130
    result = read(tmp_path)
    assert (result.interrupted, result.facts["stage"]) == (True, when)
    assert rows_by_name(result, "training")["text"].values["steps"] == (2 if when == "training" else 3)
    assert len(result.cases("lengths")) == (0 if when == "training" else 1)
    assert f"INTERRUPTED while {when}" in (tmp_path / "report.md").read_text()
    assert f"INTERRUPTED while {when}" in capsys.readouterr().out
    load_model(tmp_path / "model.pt")


def test_sampling_continues_the_prompt(trained, capsysbinary):
    command = ["demo", "--out", str(trained), "--sample", "línea ", "--bytes", "20", "--seed", "3"]
    assert cli.main(command) == 0
    first = capsysbinary.readouterr().out
    assert first.startswith("línea ".encode())
    assert cli.main(command) == 0
    assert capsysbinary.readouterr().out == first
    assert cli.main([*command, "--json"]) == 0
    sampled = json.loads(capsysbinary.readouterr().out)
    assert (sampled["schema"], sampled["prompt"]) == (1, "línea ")
    assert ("línea " + sampled["sample"] + "\n").encode() == first


@torch.no_grad()
def test_what_is_sampled_is_what_computing_every_row_again_gives():
    """Over the ends of all segments, those of the context too."""
    model = ByteTransformer(ModelConfig(context=64, width=16, layers=2)).eval()
    text = [0, *b"x" * 50]
    for drawn in sample_bytes(model, b"x" * 50, 30, 0.0, 0):
        logits = model(torch.tensor([text]))[0, -1]
        logits[0] = -torch.inf
        text.append(drawn)
        assert logits.argmax() == drawn
    caches = model.caches()
    found = [model(torch.tensor([text[i : i + 1]]), caches) for i in range(len(text))]
    torch.testing.assert_close(torch.cat(found, 1), model(torch.tensor([text])))


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("evil"),))


FOREIGN = {
    "text": "not a checkpoint",
    "a state": dict(state_dict={}),
    "code": dict(config=Evil(), weights={}),
    "weights": dict(config=dict(context=64), weights={}),
    "numbers": dict(config=3, weights=3),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_checkpoint_is_refused(content, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("m.pt").write_text(content) if isinstance(content, str) else torch.save(content, "m.pt")
    assert cli.main(["demo", "--sample", "x", "--checkpoint", "m.pt"]) == 2
    error = capsys.readouterr().err
    assert "--checkpoint: 'm.pt' holds no model of this `dilkit demo`" in error
    assert error.count("\n") == 1
    assert not Path("evil").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [  # beside those of tests/core/malformed/commands.py
        (["--text", "missing.txt"], "--text: 'missing.txt' cannot be read"),
        (["--text", "empty.txt"], "--text: 'empty.txt' is no text"),
        (["--text", "binary"], "--text: 'binary' is no text"),
        (["--text", "nothing"], "--text: nothing leaves 0 bytes to learn from"),
        (["--text", "a.txt", "--context", "64"], "--text: a.txt leaves 0 bytes to learn from"),
        (["--text", "a.txt", "b.txt"], "more than --context 8,192 of each are needed"),
        (["--steps", "1", "--minutes", "1"], "not allowed with"),
        (["--sample", "x", "--minutes", "1"], "--minutes: has no meaning with --sample"),
        (["--sample", "x"], "--checkpoint: 'dilkit-demo/model.pt' does not exist"),
        (["--text", "a.txt", "b.txt", "--context", "64", "--out", "a.txt"], "--out: folder 'a.txt' cannot be made"),
    ],
)
def test_bad_input_is_named(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some words " * 20)
    Path("b.txt").write_text("other words " * 20)
    Path("empty.txt").touch()
    Path("binary").write_bytes(b"\0" * 100)
    Path("nothing").mkdir()
    assert cli.main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


TINY = ModelConfig(context=64, width=16, layers=1, heads=2)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "model.pt"
    save_model(ByteTransformer(TINY), path)
    return path


@pytest.mark.parametrize(
    "change",
    [dict(width=10**9), dict(layers=2), dict(heads=3), dict(context=-1), dict(context="x"), dict(depth=3)],
    ids=str,
)
def test_sizes_that_are_not_those_of_the_weights_are_refused(model_file, change, tmp_path):
    content = torch.load(model_file, weights_only=True)
    torch.save(content | dict(config=content["config"] | change), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt' holds no model"):
        load_model(tmp_path / "model.pt")
