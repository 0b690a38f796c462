"""Tiny models of any class of transformers, compared with eager attention: forward pass, padding, cached steps, generation.

Several `configurations` and inputs are tried; the first with which a model runs are taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers import registration
from dilkit.integrations.transformers.attention import attend
from dilkit.integrations.transformers.proof.configurations import configurations
from dilkit.integrations.transformers.proof.inputs import inputs_of
from dilkit.pattern import Pattern

DENSE = "dilkit_dense"
CLOSE = 2e-5
NEW_TOKENS = 8
LARGEST = 30_000_000


class Tiny:
    def __init__(self, kind: Any, config: Any) -> None:
        self.kind, self.config = kind, config
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(copy.deepcopy(self.config)).parameters())
        if size > LARGEST:
            raise ValueError(f"it cannot be made small: {size:,} parameters")
        torch.manual_seed(1)
        self.eager = self._made("eager")
        self.inputs, self.wanted = self._computed()

    def _computed(self) -> tuple[dict[str, Any], Tensor]:
        first_error: Exception | None = None
        for inputs in inputs_of(self.eager):
            try:
                if (wanted := computed(self.eager, inputs)).isfinite().all():
                    return inputs, wanted
                raise ValueError("its results with eager attention are no numbers")
            except Exception as error:
                first_error = first_error or error
        raise first_error or ValueError("no argument of its forward is known")

    def _made(self, name: str) -> Any:
        config = copy.deepcopy(self.config)
        config._attn_implementation = name
        return self.kind(config).eval()

    def other(self, name: str) -> Any:
        model = self._made(name)
        model.load_state_dict(self.eager.state_dict(), strict=False)
        return model


def first_that_runs(kind: Any, config_kind: Any) -> Tiny:
    """Return a tiny model of the class `kind`, if possible one that asks for attention. Raises the first error if none runs."""
    registration.register(Pattern.dense(), DENSE)
    first_error: Exception | None = None
    without_attention: Tiny | None = None
    for config in configurations(config_kind):
        try:
            tiny = Tiny(kind, config)
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


def _asked(tiny: Tiny) -> bool:
    try:
        with asking() as layers:
            computed(tiny.other(DENSE), tiny.inputs)
    except Exception:
        return True
    return bool(layers)


@contextmanager
def asking() -> Iterator[list[Any]]:
    """Yield a list, to which the layers that ask for dilated attention meanwhile are added."""
    interface, layers = registration.transformers().AttentionInterface, []
    before = interface().get(DENSE)

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        layers.append(module)
        return attend(Pattern.dense(), None, module, *args, **kwargs)

    counted.func, counted.args = attend, (Pattern.dense(), None)  # type: ignore[attr-defined]  # what `is_registered` looks at
    interface.register(DENSE, counted)
    try:
        yield layers
    finally:
        interface.register(DENSE, before)


@dataclass(frozen=True)
class Compared:
    """A model beside eager attention: checks that are equal, wrong and refused, and the layers that asked."""

    model: Any
    layers: list[Any]
    equal: list[str]
    wrong: list[str]
    refused: list[str]


def compare(tiny: Tiny) -> Compared:
    model = tiny.other(DENSE)
    with asking() as layers:
        compared = Compared(model, layers, [], [], [])
        for trial in trials(tiny, model):
            try:
                difference = trial.difference()
            except Exception as error:
                if not compared.equal + compared.wrong:
                    raise
                refused = isinstance(error, ValueError)
                (compared.refused if refused else compared.wrong).append(f"{trial.name} is refused: {in_words(error)}")
            else:
                (compared.wrong if difference else compared.equal).append(trial.name + (difference and f" is {difference}"))
    return compared


@dataclass(frozen=True)
class Trial:
    """One comparison: `run` computes on dilated attention, `wanted` is what eager attention gives. `exact`: to the bit."""

    name: str
    run: Callable[[], Tensor]
    wanted: Tensor
    exact: bool = False

    def difference(self) -> str:
        result = self.run()
        if result.shape != self.wanted.shape:
            return f"of shape {tuple(result.shape)}, not {tuple(self.wanted.shape)}"
        off = float((result - self.wanted).abs().max())
        most = 0.0 if self.exact else CLOSE * max(1.0, float(self.wanted.abs().max()))
        return "" if off <= most else f"off by {off:.2g}"


def trials(tiny: Tiny, model: Any) -> Iterator[Trial]:
    yield Trial("a forward pass", partial(computed, model, tiny.inputs), tiny.wanted)
    if "input_ids" not in tiny.inputs:
        return
    after, of_rows = changed(tiny.inputs, -1), tiny.wanted.dim() == 3 and tiny.wanted.shape[1] > 1
    if of_rows and torch.equal(computed(tiny.eager, after)[:, :-1], tiny.wanted[:, :-1]):
        yield Trial("no look ahead", lambda: computed(model, after)[:, :-1], computed(model, tiny.inputs)[:, :-1], exact=True)
    for side, padding in (("left", slice(0, 7)), ("right", slice(-7, None))):
        mask = torch.ones_like(tiny.inputs["input_ids"])
        mask[0, padding] = 0
        padded, tokens = tiny.inputs | dict(attention_mask=mask), mask.bool()
        other = padded | dict(input_ids=torch.where(tokens, padded["input_ids"], 5))
        wanted, by_other = (_if_possible(computed, tiny.eager, inputs) for inputs in (padded, other))
        if wanted is None or by_other is None or wanted.shape[:2] != mask.shape:
            continue
        if same(wanted[tokens], by_other[tokens]):  # else what the padding holds counts, as in layers that are recurrent
            yield Trial(
                f"padding on the {side}",
                partial(lambda inputs, tokens: computed(model, inputs)[tokens], padded, tokens),
                wanted[tokens],
            )
    wanted = _if_possible(_generated, tiny.eager, tiny.inputs) if tiny.eager.can_generate() else None
    if wanted is not None:
        yield Trial("generation by cached steps", partial(_generated, model, tiny.inputs), wanted)


def _generated(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the logits of new tokens, which tell more than the tokens do, or these where a model says no logits."""
    options: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    options |= dict(use_cache=True, output_logits=True, return_dict_in_generate=True)
    text = model.generate(**options, **{key: value for key, value in inputs.items() if key not in options})
    return torch.stack(text.logits) if getattr(text, "logits", None) else getattr(text, "sequences", text)


def _if_possible(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception:
        return None


def changed(inputs: dict[str, Any], place: int) -> dict[str, Any]:
    ids = inputs["input_ids"].clone()
    ids[:, place] = (ids[:, place] + 7) % 50 + 4
    return inputs | {name: ids for name in ("input_ids", "decoder_input_ids") if name in inputs}


def same(found: Tensor, wanted: Tensor) -> bool:
    return not Trial("", lambda: found, wanted).difference()


def computed(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the first result of a model that is a tensor of numbers, logits before others."""
    torch.manual_seed(3)
    out = model(**inputs)
    named = [getattr(out, name, None) for name in ("logits", "last_hidden_state")]
    return next(x for x in _tensors((*named, *(out if isinstance(out, tuple) else out.values()))) if x.is_floating_point())


def _tensors(results: Any) -> Iterator[Tensor]:
    for result in results:
        if isinstance(result, Tensor):
            yield result
        elif isinstance(result, (tuple, list, dict)):
            yield from _tensors(result.values() if isinstance(result, dict) else result)


def in_words(error: BaseException) -> str:
    """Return what an error says, in one line; its class too, unless it is a ValueError."""
    text = " ".join(str(error).split())
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:300]
