"""What lets transformers' manager of continuous batching take a model with dilated attention."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

SWITCH = "switch_to_cb_friendly_attn"
"""The method that decides on the attention of a model; in a version without it transformers refuses ours."""


def watch_managers(is_ours: Callable[[object], bool]) -> None:
    """Have the manager leave the attention of a model as it is where it is ours; once is enough.

    It knows "eager", "sdpa" and flash attention by name. In place of others it takes flash attention, or refuses without it.
    """
    package = importlib.import_module("transformers.generation.continuous_batching")
    manager: Any = package.ContinuousBatchingManager
    switch = getattr(manager, SWITCH, None)
    if switch is None or getattr(switch, "watched_by", None) == __name__:
        return
    _watch_pools(package.PagedAttentionCache, is_ours)

    @functools.wraps(switch)
    def watched(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours(model.config._attn_implementation):
            switch(self, model, *args, **kwargs)
        elif not model._supports_attention_backend:
            raise ValueError(
                f"{type(model).__name__} in continuous batching: its layers hand nothing on to the attention function, which "
                "would not see the pool (transformers says so by _supports_attention_backend=False); take generate"
            )

    watched.watched_by = __name__  # type: ignore[attr-defined]
    setattr(manager, SWITCH, watched)


def _watch_pools(pool: Any, is_ours: Callable[[object], bool]) -> None:
    """Have `pool.update` hand the pool itself on to our attention function, which reads and writes it.

    From transformers 5.24 on, each layer calls `update` before its attention, and it copies all keys out of the pool.
    """
    update = pool.update

    @functools.wraps(update)
    def watched(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self.config._attn_implementation):
            return update(self, key_states, value_states, *args, **kwargs)
        kwargs["kwargs"]["cache"] = self  # the options of the layer's call
        return key_states, value_states

    pool.update = watched
