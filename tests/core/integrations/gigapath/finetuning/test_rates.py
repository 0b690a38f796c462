"""Learning rates: of each layer and each step, those of GigaPath's fine-tuning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.slide_tables import tiny_encoder

from dilkit.integrations.gigapath.finetuning.rates import layer_scale, optimizer_of, rate_at, set_rate
from dilkit.integrations.gigapath.finetuning.settings import Settings

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


def test_a_frozen_encoder_is_not_in_the_optimizer() -> None:
    encoder, head = tiny_encoder().requires_grad_(False), torch.nn.Linear(16, 2)
    groups = optimizer_of(encoder, head, DEPTH, Settings()).param_groups
    assert [weight for group in groups for weight in group["params"]] == [head.weight, head.bias]


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
