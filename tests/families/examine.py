"""What becomes of a class of models of transformers whose attention is to be dilkit's: right, or refused with a reason."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from families.tiny import LARGEST, VARIANTS, config_of, inputs_of
from torch import Tensor

from dilkit import Pattern, SlidingWindow
from dilkit.integrations.transformers import registration
from dilkit.integrations.transformers.attention import attend

EQUAL, WRONG = "equal to eager attention", "WRONG"
NOT_LOOKED_UP = "refused when it is made: it does not look its attention up by name"
REFUSED, NO_ATTENTION, NOT_TRIED = "refused", "has no attention", "not tried"
CLOSE = 2e-5
SECONDS = 30
NEW_TOKENS = 8
NAMES = {
    "dilkit_dense": Pattern.dense(),
    "dilkit_by_head": Pattern([4, 16], [1, 2]),
    "dilkit_alone": Pattern.of(SlidingWindow(1)),
}


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


class _Tiny:
    """A model that runs with eager attention, and copies of it with other attention."""

    def __init__(self, kind: Any, config_kind: Any, variant: dict[str, Any]) -> None:
        self.kind, self.config = kind, config_of(config_kind, variant)
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(copy.deepcopy(self.config)).parameters())
        if size > LARGEST:
            raise ValueError(f"it cannot be made small: {size:,} parameters")
        torch.manual_seed(1)
        self.eager = self._made("eager")
        self.inputs, self.wanted = self._computed()

    def _computed(self) -> tuple[dict[str, Any], Tensor]:
        """Inputs, and what `eager` gives: those of the main input or, if they are too few, images beside."""
        first, more = inputs_of(self.eager), inputs_of(self.eager, and_images=True)
        try:
            return first, computed(self.eager, first)
        except Exception:
            if more.keys() == first.keys():
                raise
        return more, computed(self.eager, more)

    def _made(self, name: str) -> Any:
        config = copy.deepcopy(self.config)
        config._attn_implementation = name
        return self.kind(config).eval()

    def other(self, name: str) -> Any:
        """The same weights with the attention `name`. Raises what refuses it."""
        model = self._made(name)
        model.load_state_dict(self.eager.state_dict(), strict=False)
        return model


def examine(name: str, family: str) -> Examined:
    """Try the class `name` of transformers."""
    import transformers

    from_family = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for attention, pattern in NAMES.items():
        registration.register(pattern, attention)
    with _limit(SECONDS * 3), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            kind = getattr(transformers, name)
            config_kind = kind.config_class or from_family[family]
            if _is_refused(kind, config_kind):
                return Examined(name, family, NOT_LOOKED_UP)
            tiny = _first_that_runs(kind, config_kind)
        except Exception as error:
            return Examined(name, family, NOT_TRIED, _words(error))
        return _verdict(name, family, tiny)


def _is_refused(kind: Any, config_kind: Any) -> bool:
    """Whether it is refused before its sizes matter."""
    config = config_of(config_kind, {})
    config._attn_implementation = "dilkit_dense"
    try:
        with torch.device("meta"):
            kind(config)
    except Exception as error:
        return "does not look its attention up by name" in str(error)
    return False


def _first_that_runs(kind: Any, config_kind: Any) -> _Tiny:
    first_error: Exception | None = None
    without_attention: _Tiny | None = None
    for variant in VARIANTS:
        try:
            tiny = _Tiny(kind, config_kind, variant)
        except ImportError:
            raise
        except Exception as error:
            first_error = first_error or error
            continue
        if not kind._can_set_attn_implementation() or _asked(tiny):
            return tiny
        without_attention = without_attention or tiny
    if without_attention is not None:
        return without_attention
    assert first_error is not None
    raise first_error


def _asked(tiny: _Tiny) -> bool:
    """Whether any layer looks attention up; what refuses it has been asked."""
    try:
        with _calls() as calls:
            computed(tiny.other("dilkit_dense"), tiny.inputs)
    except Exception:
        return True
    return bool(calls)


def _verdict(name: str, family: str, tiny: _Tiny) -> Examined:
    try:
        model = tiny.other("dilkit_dense")
        with _calls() as calls:
            found = computed(model, tiny.inputs)
        computed(tiny.other("dilkit_by_head"), tiny.inputs)
    except Exception as error:
        return Examined(name, family, REFUSED, _words(error))
    if not calls:
        return Examined(name, family, NO_ATTENTION)
    if not _same(found, tiny.wanted):
        return Examined(name, family, WRONG, f"off by {float((found - tiny.wanted).abs().max()):.2g}")
    checks, wrong, refused = ["a forward pass"], [], []
    for what, trial in _of_texts(tiny, model):
        try:
            (checks if trial() else wrong).append(what)
        except ValueError as error:
            refused.append(f"{what} is refused: {_words(error)}")
    if wrong:
        return Examined(name, family, WRONG, ", ".join(wrong))
    return Examined(name, family, EQUAL, "; ".join(refused), tuple(checks), _every_layer_asks(tiny))


def _of_texts(tiny: _Tiny, model: Any) -> Iterator[tuple[str, Callable[[], bool]]]:
    """What else a model of texts is tried with, as far as eager attention can do it: whether it is right."""
    if "input_ids" not in tiny.inputs:
        return
    changed = _changed(tiny.inputs, -1)
    if _earlier(computed(tiny.eager, changed), tiny.wanted) == 0:
        yield "no look ahead", lambda: _earlier(computed(model, changed), computed(model, tiny.inputs)) == 0
    for side, padding in (("left", slice(0, 7)), ("right", slice(-7, None))):
        mask = torch.ones_like(tiny.inputs["input_ids"])
        mask[0, padding] = 0
        padded, tokens = tiny.inputs | dict(attention_mask=mask), mask.bool()
        other = padded | dict(input_ids=torch.where(tokens, padded["input_ids"], 5))
        wanted, by_other = (_if_possible(computed, tiny.eager, inputs) for inputs in (padded, other))
        if wanted is None or by_other is None or wanted.shape[:2] != mask.shape:
            continue
        if _same(wanted[tokens], by_other[tokens]):  # else what the padding holds counts, as in layers that are recurrent
            yield f"padding on the {side}", partial(_equal_rows, model, padded, tokens, wanted[tokens])
    options: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    options |= {key: value for key, value in tiny.inputs.items() if key != "use_cache"}
    text = _if_possible(tiny.eager.generate, **options) if tiny.eager.can_generate() else None
    if text is not None:
        yield "generation", lambda: torch.equal(model.generate(**options), text)


def _equal_rows(model: Any, inputs: dict[str, Any], rows: Tensor, wanted: Tensor) -> bool:
    return _same(computed(model, inputs)[rows], wanted)


def _if_possible(call: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor | None:
    """What eager attention gives; None where the model cannot do it at all."""
    try:
        return call(*args, **kwargs)
    except Exception:
        return None


def _every_layer_asks(tiny: _Tiny) -> bool | None:
    """Whether a token moves no other's row where each sees itself alone: a layer that did not ask would see it.

    Not known of an encoder with a decoder, whose cross-attention sees all.
    """
    if "input_ids" not in tiny.inputs or "decoder_input_ids" in tiny.inputs:
        return None
    model = tiny.other("dilkit_alone")
    try:
        before, after = (computed(model, inputs) for inputs in (tiny.inputs, _changed(tiny.inputs, 3)))
    except Exception:
        return None
    if before.dim() < 3 or before.shape[1] != tiny.inputs["input_ids"].shape[1]:
        return None
    rows = torch.arange(before.shape[1]) != 3
    return _same(after[:, rows], before[:, rows])


def _changed(inputs: dict[str, Any], place: int) -> dict[str, Any]:
    ids = inputs["input_ids"].clone()
    ids[:, place] = (ids[:, place] + 7) % 50 + 4
    return inputs | {name: ids for name in ("input_ids", "decoder_input_ids") if name in inputs}


def _earlier(one: Tensor, other: Tensor) -> float | None:
    """How far all rows but the last differ; None where results are not of rows."""
    return float((one - other)[:, :-1].abs().max()) if one.dim() == 3 and one.shape[1] > 1 else None


def _same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= CLOSE * max(1.0, float(wanted.abs().max())))


def computed(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The first result of a model that is a tensor of numbers, logits before others."""
    torch.manual_seed(3)
    out = model(**inputs)
    results = [
        getattr(out, "logits", None),
        getattr(out, "last_hidden_state", None),
        *(out if isinstance(out, tuple) else out.values()),
    ]
    return next(x for x in results if isinstance(x, Tensor) and x.is_floating_point())


@contextmanager
def _calls() -> Iterator[list[Any]]:
    """The layers that ask for dilated attention meanwhile."""
    interface, calls = registration.transformers().AttentionInterface, []
    before = interface().get("dilkit_dense")

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return attend(NAMES["dilkit_dense"], None, module, *args, **kwargs)

    interface.register("dilkit_dense", counted)
    try:
        yield calls
    finally:
        interface.register("dilkit_dense", before)


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:300]


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
