"""Checks of the attention that a model of transformers is made with, whenever it is made, loaded or changed.

transformers knows the name alone, and asks dilkit nothing until a layer calls. So a model that never looks attention up by name
would compute its own without a word, and so would one that was converted, if it is loaded without `attn_implementation`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from dilkit.integrations.newer import check_class
from dilkit.integrations.transformers.biases.alibi import watch_alibi
from dilkit.integrations.transformers.biases.tables import watch_tables

SAVED_AS = "attn_implementation"
"""The attribute of a configuration that is saved, and that transformers takes for `attn_implementation=` when it loads it."""


def watch_models(base: Any, is_ours: Callable[[object], bool]) -> None:
    """Have `base`, transformers' `PreTrainedModel`, check whenever it decides on the attention of a model; once is enough."""
    decide = base.get_correct_attn_implementation
    if getattr(decide, "watched_by", None) == __name__:
        return

    @functools.wraps(decide)
    def watched(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if is_ours(requested_attention):
            if not watch_alibi(type(model), is_ours):
                _check_looked_up(type(model), requested_attention)
            watch_tables(type(model))
            check_proven(type(model))
            if getattr(model.config, "dilkit", None) is not None:
                setattr(model.config, SAVED_AS, requested_attention)
        elif requested_attention is None and getattr(model.config, "dilkit", None) is not None:
            _say_not_asked(type(model).__name__)
        return decide(model, requested_attention, *args, **kwargs)

    watched.watched_by = __name__  # type: ignore[attr-defined]
    base.get_correct_attn_implementation = watched


def check_proven(kind: Any) -> None:
    """Raise ValueError for a class of a version of transformers that is not tested, if it is wrong on dilated attention.

    A class of somebody else is taken for the one of transformers that it is derived from.
    """
    base = next((x for x in kind.__mro__ if x.__module__.startswith("transformers.models.")), kind)
    check_class("transformers", sys.modules["transformers"].__version__, base, "dilkit.integrations.transformers.proof.proving")


def classes_with(model: Any, layers: Iterable[Any]) -> dict[Any, None]:
    """Return the classes of `model`, and of the models within it, that hold one of the `layers`; the outermost comes first."""
    wanted = {*map(id, layers)}
    models = (x for x in model.modules() if hasattr(x, "set_attn_implementation"))
    return {type(x): None for x in models if not wanted.isdisjoint(map(id, x.modules()))}


def _check_looked_up(kind: Any, name: str | None) -> None:
    """Raise ValueError for a class of models that computes attention by itself, whatever its name.

    transformers knows it from the source of the class; of one without, as in a notebook, nothing is known.
    """
    if not kind._can_set_attn_implementation() and _has_source(kind):
        raise ValueError(
            f"attn_implementation={name!r}: {kind.__name__} does not look its attention up by name, so it would compute its own; "
            "use 'eager'. If it is a part of a larger model, name the attention of each part: "
            f"attn_implementation={{'text_config': {name!r}, 'vision_config': 'eager'}}"
        )


def _has_source(kind: type) -> bool:
    try:
        return bool(inspect.getsource(sys.modules[kind.__module__]))
    except (KeyError, OSError, TypeError):
        return False


def _say_not_asked(kind: str) -> None:
    warnings.warn(
        f"the configuration of this {kind} has a pattern for dilated attention, config.dilkit, but no attn_implementation: it "
        "computes transformers' own attention. Give attn_implementation='dilkit', or delete config.dilkit",
        UserWarning,
        stacklevel=2,
    )
