"""What training begins with: an architecture with its weights, or other sizes with random ones; and how fast it learns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.slide_tables import WIDTH, table, tiny_encoder, write_slide

from dilkit.integrations.gigapath import ARCHITECTURES
from dilkit.integrations.gigapath.checkpoint import read_checkpoint
from dilkit.integrations.gigapath.finetuning import look_through, read_labels
from dilkit.integrations.gigapath.finetuning.encoders import check_tile_encoder, config_for, first_encoder
from dilkit.integrations.gigapath.finetuning.rates import layer_scale, optimizer_of, rate_at, set_rate
from dilkit.integrations.gigapath.finetuning.settings import Settings
from dilkit.integrations.gigapath.finetuning.slides import SlideFile

SIZES = dict(embed_dim=16, depth=2, num_heads=2)
SLIDES = (SlideFile(Path("a.pt"), 5, 256, WIDTH, "uni_v2"),)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the weights of an architecture that is known while the test runs."""
    encoder = tiny_encoder()
    monkeypatch.setitem(ARCHITECTURES, "tiny", encoder.config)
    torch.save({"model": encoder.state_dict()}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_weights_of_a_checkpoint(weights: Path) -> None:
    found = read_checkpoint(weights)
    config = config_for(SLIDES, "tiny", found, dropout=0.5, depth=None)
    encoder = first_encoder(config, found)
    assert (encoder.config.dropout, encoder.config.global_pool, encoder.activation_checkpointing) == (0.5, True, True)
    assert all(torch.equal(weight, encoder.state_dict()[name]) for name, weight in tiny_encoder().state_dict().items())
    with pytest.raises(ValueError, match=r"depth=3: .*weights\.pth is of 'tiny', which has other sizes; leave them out"):
        config_for(SLIDES, "tiny", found, depth=3)


def test_random_weights_depend_on_the_seed_and_take_the_tiles_that_there_are() -> None:
    config = config_for(SLIDES, **SIZES)
    assert (config.in_chans, config.global_pool) == (WIDTH, True)
    first, same, other = (first_encoder(config, seed=seed).cls_token for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_features_of_another_tile_encoder_are_refused() -> None:
    with pytest.raises(ValueError, match=r"features are of 'uni_v2', as a\.pt says, not of 'gigapath'"):
        check_tile_encoder(SLIDES, "gigapath")
    check_tile_encoder(SLIDES, "UNI")


def test_tiles_whose_size_nobody_says(tmp_path: Path) -> None:
    """They are 256 pixels wide if they lie so."""
    labels = read_labels(table(tmp_path, "slide,time,event", "a,1,1"))
    write_slide(tmp_path / "a.pt", 25)
    assert look_through(labels, tmp_path)[0].tile_size == 256
    content = torch.load(tmp_path / "a.pt")
    torch.save({**content, "coords": 2 * content["coords"]}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"line 2: .*512 pixels apart, and neither the file nor tile_size says"):
        look_through(labels, tmp_path)
    assert look_through(labels, tmp_path, tile_size=512)[0].tile_size == 512


DEPTH = 2


def test_each_layer_learns_more_slowly_than_the_next() -> None:
    encoder, head = tiny_encoder(depth=DEPTH), torch.nn.Linear(16, 2)
    optimizer = optimizer_of(encoder, head, DEPTH, Settings(layer_decay=0.5, weight_decay=0.1))
    set_rate(optimizer, 8.0)
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


def test_a_parameter_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name='decoder\.weight' is no parameter of a SlideEncoder"):
        layer_scale("decoder.weight", DEPTH, 0.95)


def test_the_rate_of_each_step() -> None:
    """As GigaPath's: rising from 0 over the warm-up, then half a cosine down to the least rate."""
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
def test_settings_that_do_not_fit(changes: dict[str, Any], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        Settings(**changes)
