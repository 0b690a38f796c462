"""What becomes of a class of models of transformers whose attention is to be dilkit's: right, or refused with a reason."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dilkit import Pattern, SlidingWindow, environment
from dilkit.integrations.transformers.proof.tiny import config_of
from dilkit.integrations.transformers.proof.trials import (
    DENSE,
    Tiny,
    changed,
    compare,
    computed,
    first_that_runs,
    in_words,
    same,
)
from dilkit.integrations.transformers.registration import register

EQUAL, WRONG = "equal to eager attention", "WRONG"
NOT_LOOKED_UP = "refused when it is made: it does not look its attention up by name"
REFUSED, NO_ATTENTION, NOT_TRIED = "refused", "has no attention", "not tried"
SECONDS = 90
NAMES = {DENSE: Pattern.dense(), "dilkit_by_head": Pattern([4, 16], [1, 2]), "dilkit_alone": Pattern.of(SlidingWindow(1))}


@dataclass(frozen=True)
class Examined:
    """One class of models. `family`: what transformers calls it, its `model_type`.

    `checks`: what equals eager attention. `every_layer_asks`: whether no token moves another where each sees itself alone; None
    where that is not known.
    """

    model: str
    family: str
    verdict: str
    reason: str = ""
    checks: tuple[str, ...] = ()
    every_layer_asks: bool | None = None


def examine(name: str, family: str) -> Examined:
    """Try the class `name` of transformers."""
    import transformers

    from_family = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for attention, pattern in NAMES.items():
        register(pattern, attention)
    with _limit(SECONDS), environment.without_proofs(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            kind = getattr(transformers, name)
            config_kind = kind.config_class or from_family[family]
            if _is_refused(kind, config_kind):
                return Examined(name, family, NOT_LOOKED_UP)
            return _verdict(name, family, first_that_runs(kind, config_kind))
        except (Exception, TooLate) as error:
            return Examined(name, family, NOT_TRIED, in_words(error))


def _is_refused(kind: Any, config_kind: Any) -> bool:
    """Whether it is refused before its sizes matter."""
    config = config_of(config_kind, {})
    config._attn_implementation = DENSE
    try:
        with torch.device("meta"):
            kind(config)
    except Exception as error:
        return "does not look its attention up by name" in str(error)
    return False


def _verdict(name: str, family: str, tiny: Tiny) -> Examined:
    try:
        compared = compare(tiny)
        computed(tiny.other("dilkit_by_head"), tiny.inputs)
    except Exception as error:
        return Examined(name, family, REFUSED, in_words(error))
    if not compared.layers:
        return Examined(name, family, NO_ATTENTION)
    if compared.wrong:
        return Examined(name, family, WRONG, "; ".join(compared.wrong))
    return Examined(name, family, EQUAL, "; ".join(compared.refused), tuple(compared.equal), _every_layer_asks(tiny))


def _every_layer_asks(tiny: Tiny) -> bool | None:
    """Whether a token moves no other's row where each sees itself alone: a layer that did not ask would see it.

    Not known of an encoder with a decoder, whose cross-attention sees all.
    """
    if "input_ids" not in tiny.inputs or "decoder_input_ids" in tiny.inputs:
        return None
    model = tiny.other("dilkit_alone")
    try:
        before, after = (computed(model, inputs) for inputs in (tiny.inputs, changed(tiny.inputs, 3)))
    except Exception:
        return None
    if before.dim() < 3 or before.shape[1] != tiny.inputs["input_ids"].shape[1]:
        return None
    rows = torch.arange(before.shape[1]) != 3
    return same(after[:, rows], before[:, rows])


class TooLate(BaseException):
    """Ends what takes any other exception for an answer."""


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooLate(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@cache
def classes() -> tuple[tuple[str, str], ...]:
    """All classes of base models and of causal language models that transformers has, each with its family."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables = (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, str] = {}
    for family in CONFIG_MAPPING:
        for table in tables:
            names = table.get(family, ())
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, family)
    return tuple(found.items())
