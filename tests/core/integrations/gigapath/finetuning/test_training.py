"""Training: what it begins with, how fast it learns, gradients of one batch, resumed runs, and that it learns where tiles lie."""

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.slide_tables import WIDTH, cohort, table, tiny_encoder, write_slide

from dilkit.integrations.gigapath import ARCHITECTURES, SlideEncoderConfig, load_slide_encoder
from dilkit.integrations.gigapath.checkpoint import read_checkpoint
from dilkit.integrations.gigapath.finetuning import (
    Settings,
    finetune,
    look_through,
    read_labels,
    split_examples,
    training as training_module,
)
from dilkit.integrations.gigapath.finetuning.labels import Labels
from dilkit.integrations.gigapath.finetuning.model import (
    SlideFile,
    SlideModel,
    config_for,
    first_encoder,
    slide_reader,
)
from dilkit.integrations.gigapath.finetuning.training import Objective, accumulate, layer_scale, optimizer_of, rate_at, set_rate

SETTINGS = Settings(epochs=3, accumulate=4, base_rate=0.3, resamples=20)
DROPPING = dict(dropout=0.2, drop_path=0.2)
Slides = tuple[Labels, tuple[SlideFile, ...]]


@pytest.fixture
def slides(tmp_path):
    return cohort(tmp_path / "slides", survival=True)


@pytest.mark.parametrize("survival", [False, True])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_gradients_are_those_of_one_batch(tmp_path, survival, activation_checkpointing):
    labels, files = cohort(tmp_path, survival=survival)
    options = dict(dropout=0.0, drop_path=0.0, dtype=torch.float64)
    encoder = tiny_encoder(activation_checkpointing=activation_checkpointing, **options)
    read = slide_reader(files, encoder.cls_token)
    objective, group = Objective(labels), [1, 6, 3, 8, 10]
    model = SlideModel(encoder, objective.outputs, read)
    loss = accumulate(model, group, objective, seed=0)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()

    slides = [read(i) for i in group]
    longest = max(slide.tiles.shape[1] for slide in slides)
    tiles, coords = torch.zeros(5, longest, 6, dtype=torch.float64), torch.zeros(5, longest, 2, dtype=torch.int64)
    missing = torch.ones(5, longest, dtype=torch.bool)
    for row, slide in enumerate(slides):
        n = slide.tiles.shape[1]
        tiles[row, :n], coords[row, :n], missing[row, :n] = slide.tiles[0], slide.coords[0], False
    whole = objective.loss(model.head(encoder(tiles, coords, missing)[0]), group)
    whole.backward()
    assert loss == pytest.approx(whole.item())
    for name, weight in model.named_parameters():
        assert torch.allclose(gradients[name], weight.grad, rtol=1e-8, atol=1e-10), name


def test_both_passes_drop_the_same(tmp_path):
    """Cox's likelihood needs each slide twice, with the same weights."""
    labels, files = cohort(tmp_path, survival=True)
    encoder = tiny_encoder(**DROPPING, dtype=torch.float64).train()
    model = SlideModel(encoder, 1, slide_reader(files, encoder.cls_token))
    objective, group, step = Objective(labels), [0, 1, 4, 5], 1e-6
    before = accumulate(model, group, objective, seed=3)
    direction = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    slope = sum((weight.grad * direction[name]).sum().item() for name, weight in model.named_parameters())
    for name, weight in model.named_parameters():
        weight.data += step * direction[name]
    after = accumulate(model, group, objective, seed=3)
    assert (after - before) / step == pytest.approx(slope, rel=1e-3)
    assert accumulate(model, group, objective, seed=4) != pytest.approx(after)


def interrupted(slides, out, settings, steps):
    """Return the record of a run that ended after so many steps and went on as in another process."""

    def stop(step, *_):
        if step == steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(*slides, tiny_encoder(**DROPPING), out, settings, progress=stop)
    torch.randn(7)  # a process that goes on has other random numbers behind it
    return finetune(*slides, tiny_encoder(**DROPPING), out, settings, resume=True)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize(("steps", "save_seconds"), [pytest.param(3, 600.0, marks=pytest.mark.slow), (2, 0.0)])
def test_a_resumed_run_is_the_uninterrupted_run(slides, tmp_path, monkeypatch, freeze, steps, save_seconds):
    monkeypatch.setattr(training_module, "SAVE_SECONDS", save_seconds)
    settings = replace(SETTINGS, freeze=freeze)
    whole = finetune(*slides, tiny_encoder(**DROPPING), tmp_path / "whole", settings)
    again = interrupted(slides, tmp_path / "parts", settings, steps)
    other = finetune(*slides, tiny_encoder(**DROPPING), tmp_path / "other", replace(settings, epochs=2, seed=1))
    assert len(whole.losses) == 6
    assert whole.losses[0] != other.losses[0]
    assert replace(again, seconds=whole.seconds) == whole
    first, second = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts"))
    for part in ("model", "head"):
        assert all(torch.equal(weight, second[part][name]) for name, weight in first[part].items())


def test_a_frozen_encoder_does_not_change(slides, tmp_path):
    encoder = tiny_encoder(**DROPPING)
    before = {name: weight.clone() for name, weight in encoder.state_dict().items()}
    record = finetune(*slides, encoder, tmp_path / "out", replace(SETTINGS, freeze=True))
    assert all(torch.equal(weight, before[name]) for name, weight in encoder.state_dict().items())
    assert record.encoder.trained_parameters == 17
    assert len({*record.losses}) == 6
    trained = finetune(*slides, encoder, tmp_path / "other", SETTINGS)
    assert trained.encoder.trained_parameters == trained.encoder.parameters == 17 + sum(w.numel() for w in before.values())
    changed = {name for name, weight in encoder.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == before.keys()


def test_the_trained_encoder_is_read_again_with_its_settings(slides, tmp_path):
    encoder = tiny_encoder(global_pool=True, tail="exact", num_heads=1)
    finetune(*slides, encoder, tmp_path / "out", SETTINGS)
    model = tmp_path / "out" / "model.pt"
    content = torch.load(model, weights_only=True)  # without a class of dilkit's, so that other programs read it
    stored = {"model", "head", "classes", "tile_encoder", *(one.name for one in fields(SlideEncoderConfig))} - {"tile_size"}
    assert (content.keys(), content["head"].keys(), content["global_pool"]) == (stored, {"weight", "bias"}, True)
    read = load_slide_encoder(model)
    assert read.config == replace(encoder.config, tile_size=256)
    assert all(torch.equal(weight, read.state_dict()[name]) for name, weight in encoder.state_dict().items())
    sizes = "embed_dim=768, depth=12, num_heads=16, in_chans=1536"
    changes = (dict(global_pool=False), "global_pool=False"), (dict(tail="zeros"), "tail='zeros'")
    changes += (dict(segment_lengths=[4, 16]), r"segment_lengths=\(4, 16\)"), (dict(arch="gigapath_slide_enc12l768d"), sizes)
    for change, said in changes:
        with pytest.raises(ValueError, match=rf"^{said} contradicts checkpoint .*model\.pt, whose weights were trained with "):
            load_slide_encoder(model, **change)
    assert load_slide_encoder(model, ngrids=9, tile_size=512, global_pool=True, tail="exact").config.ngrids == 9


def test_what_does_not_fit_an_earlier_run_or_the_encoder_is_refused(tmp_path):
    labels, files = cohort(tmp_path / "slides", survival=True)
    checkpoint = tmp_path / "out" / "checkpoint.pt"

    def refused(words, settings=SETTINGS, slides=files, resume=True, **encoder):
        with pytest.raises(ValueError, match=words):
            finetune(labels, slides, tiny_encoder(**encoder), tmp_path / "out", settings, resume=resume)

    refused("line 2: .*s0.pt has 6 features a tile, and the encoder takes in_chans=10", resume=False, in_chans=10)
    refused("slides has 11 files for 12 lines of labels", slides=files[1:], resume=False)
    refused("resume: .*checkpoint.pt is not there")
    finetune(labels, files, tiny_encoder(), tmp_path / "out", SETTINGS)
    before = checkpoint.read_bytes()
    refused("checkpoint.pt is there, of an earlier run; resume goes on from it", resume=False)
    refused(r"is of a run with other epochs \(3 there, 4 here\); give the same", replace(SETTINGS, epochs=4))
    refused(r"is of a run with other weights \(", seed=1)
    assert checkpoint.read_bytes() == before
    torch.save({"model": {}}, checkpoint)
    refused("is no checkpoint of format 2, as this version writes it; choose another folder")


def test_steps_without_an_event_are_passed_over(tmp_path):
    """Weight decay would change weights without a gradient too."""
    labels, files = cohort(tmp_path / "slides", survival=True)
    splits = replace(split_examples(labels), train=(0, 9, 1))
    assert [labels.examples[i].event for i in splits.train] == [False, False, True]
    encoder = tiny_encoder()
    seen = [encoder.cls_token.tolist()]
    settings = replace(SETTINGS, accumulate=1, warmup_epochs=0.0, weight_decay=0.5, base_rate=10.0)
    with_event = set(range(9))

    def look(step, *_):
        seen.append(encoder.cls_token.tolist())
        if seen[-1] == seen[-2]:
            with_event.discard(step - 1)

    finetune(labels, files, encoder, tmp_path / "out", settings, splits=splits, progress=look)
    assert len(with_event) == 3
    assert {step // 3 for step in with_event} == {0, 1, 2}


def test_a_loss_that_is_not_finite_ends_it(slides, tmp_path):
    with pytest.raises(ValueError, match=r"the loss of step \d is nan; lower base_rate=1e\+30"):
        finetune(*slides, tiny_encoder(), tmp_path / "out", replace(SETTINGS, base_rate=1e30, epochs=6))


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (dict(tiles=4), r"line 3: .*holds no file of features for slide 'b'"),
        (dict(name="b", tiles=4, width=7), r"line 3: .*b.pt: tiles have 7 features, but 6 in .*a.pt"),
        (dict(name="b", tiles=4, encoder="uni"), r"line 3: .*b.pt: features are of 'uni', but of 'gigapath'"),
        (dict(name="b", tiles=4, patch_size_level0=512), r"line 3: .*b.pt: tiles have 512 pixels .* but tile_size says 256"),
        (dict(name="b", tiles=0), "line 3: .*b.pt: the slide has no tiles"),
    ],
)
def test_files_that_will_not_do_are_named_with_their_lines(tmp_path, write, complaint):
    write_slide(tmp_path / "a.pt", 3, encoder="gigapath")
    write_slide(tmp_path / f"{write.pop('name', 'c')}.pt", **write)
    labels = read_labels(table(tmp_path, "slide,time,event", "a,1,1", "b,2,1"))
    with pytest.raises(ValueError, match=complaint):
        look_through(labels, tmp_path, tile_size=256)
    with pytest.raises(ValueError, match=r"line 2: .*a\.pt: features are of 'gigapath', not of 'uni', as the file says"):
        look_through(labels, tmp_path, tile_size=256, tile_encoder="uni")


def test_the_record_says_what_is_doubtful(tmp_path):
    for i in range(8):
        write_slide(tmp_path / f"s{i}.pt", 3 + i)
    labels = read_labels(table(tmp_path, "slide,time,event,site", *(f"s{i},{i},1,x" for i in range(8))))
    splits = split_examples(labels, val_share=0.0, test_share=0.4)
    settings = replace(SETTINGS, accumulate=20)
    record = finetune(labels, look_through(labels, tmp_path), tiny_encoder(), tmp_path / "out", settings, splits=splits)
    fewer, steps, patients, unread = record.notes
    assert "accumulate=20 is more than the 5 slides to learn from: a step has 5" in fewer
    assert "3 steps hardly change the weights: more epochs (--epochs 100)" in steps
    assert (record.settings.accumulate, record.settings.peak_rate, len(record.losses)) == (5, settings.peak_rate / 4, 3)
    assert SETTINGS.for_cohort(200) == (SETTINGS, [])
    assert "--freeze" in steps
    assert "--freeze" not in replace(settings, freeze=True).for_cohort(5)[1][1]
    assert "has no column patient: each slide was taken for a patient of its own" in patients
    assert "column site is not read" in unread
    assert (record.drawn_splits, record.has_patients, record.tiles) == (True, False, sum(range(3, 11)))
    assert record.judged.keys() == {"train", "test"}
    assert [one.val for one in record.curve] == [None, None, None]


SIZES = dict(embed_dim=16, depth=2, num_heads=2)
SLIDES = (SlideFile(Path("a.pt"), 5, 256, WIDTH, "uni_v2"),)


def test_weights_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", tiny_encoder().config)
    torch.save({"model": tiny_encoder().state_dict()}, tmp_path / "weights.pth")
    found = read_checkpoint(tmp_path / "weights.pth")
    config = config_for(SLIDES, "tiny", found, dropout=0.5, depth=None)
    encoder = first_encoder(config, found)
    assert (encoder.config.dropout, encoder.config.global_pool, encoder.activation_checkpointing) == (0.5, True, True)
    assert all(torch.equal(weight, encoder.state_dict()[name]) for name, weight in tiny_encoder().state_dict().items())
    with pytest.raises(ValueError, match=r"depth=3: .*weights\.pth is of 'tiny', which has other sizes; leave them out"):
        config_for(SLIDES, "tiny", found, depth=3)


def test_random_weights_depend_on_the_seed():
    config = config_for(SLIDES, **SIZES)
    assert (config.in_chans, config.global_pool) == (WIDTH, True)
    first, same, other = (first_encoder(config, seed=seed).cls_token for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_tiles_whose_size_nobody_says(tmp_path):
    labels = read_labels(table(tmp_path, "slide,time,event", "a,1,1"))
    write_slide(tmp_path / "a.pt", 25)
    assert look_through(labels, tmp_path)[0].tile_size == 256
    content = torch.load(tmp_path / "a.pt")
    torch.save({**content, "coords": 2 * content["coords"]}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"line 2: .*512 pixels apart, and neither the file nor tile_size says"):
        look_through(labels, tmp_path)
    assert look_through(labels, tmp_path, tile_size=512)[0].tile_size == 512
    (tmp_path / "patches").mkdir()
    np.save(tmp_path / "patches" / "a.coords.npy", content["coords"].numpy())
    torch.save(content["features"], tmp_path / "a.pt")
    read = slide_reader(look_through(labels, tmp_path, coords=tmp_path / "patches"), content["features"])
    assert torch.equal(read(0).coords[0], content["coords"])


def test_each_layer_learns_more_slowly_than_the_next():
    encoder, head = tiny_encoder(depth=2), torch.nn.Linear(16, 2)
    optimizer = optimizer_of(encoder, head, 2, Settings(layer_decay=0.5, weight_decay=0.1))
    set_rate(optimizer, 8.0)
    with pytest.raises(ValueError, match=r"name='decoder\.weight' is no parameter of a SlideEncoder"):
        layer_scale("decoder.weight", 2, 0.95)
    names = {id(weight): name for name, weight in encoder.named_parameters()}
    rates, decays = {}, {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            name = names.get(id(weight), "head.weight" if weight is head.weight else "head.bias")
            rates[name], decays[name] = group["lr"], group["weight_decay"]
    assert rates.keys() == {*names.values(), "head.weight", "head.bias"}
    for name, rate in rates.items():
        first = name.startswith(("cls_token", "patch_embed"))
        expected = 1.0 if first else 2.0 if ".layers.0." in name else 4.0 if ".layers.1." in name else 8.0
        assert rate == expected, name
    assert {name for name, decay in decays.items() if decay == 0} == {
        name for name, weight in [*encoder.named_parameters(), ("head.bias", head.bias)] if weight.dim() == 1
    }


def test_the_rate_of_each_step():
    """The rate rises from 0 over the warm-up, then falls along half a cosine, as in GigaPath."""
    settings = Settings(epochs=5, warmup_epochs=1.0, base_rate=2e-3, accumulate=32, least_rate=1e-6)
    assert settings.peak_rate == 2e-3 * 32 / 256
    for epoch in (0.0, 0.25, 1.0, 1.5, 3.0, 5.0):
        share = epoch if epoch < 1 else 0.5 * (1 + math.cos(math.pi * (epoch - 1) / 4))
        expected = settings.peak_rate * share if epoch < 1 else 1e-6 + (settings.peak_rate - 1e-6) * share
        assert rate_at(epoch, settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        (dict(epochs=0), ValueError, "epochs=0 must be at least 1"),
        (dict(accumulate=2.5), TypeError, "accumulate=2.5 is a float"),
        (dict(epochs=1), ValueError, r"warmup_epochs=1.0 must be less than epochs=1.*set warmup_epochs=0.2"),
        (dict(layer_decay=0.0), ValueError, "layer_decay=0.0 must be more than 0"),
        (dict(layer_decay=1.1), ValueError, "layer_decay=1.1 must be more than 0 and at most 1"),
        (dict(base_rate=0.0), ValueError, "base_rate=0.0 must be finite and greater than 0"),
        (dict(least_rate=1.0), ValueError, r"least_rate=1.0 is more than the highest rate.*= 0.00025; raise base_rate"),
        (dict(weight_decay=-1.0), ValueError, "weight_decay=-1.0 must be at least 0"),
        (dict(freeze=1), TypeError, "freeze=1 is a int"),
    ],
)
def test_settings_that_do_not_fit(changes, error, complaint):
    with pytest.raises(error, match=complaint):
        Settings(**changes)
