"""`register`: the names that transformers looks dilated attention up by, and its hooks for continuous batching."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from dilkit.integrations.transformers.attention import attend
from dilkit.integrations.transformers.choice import watch_models
from dilkit.integrations.transformers.heads import check_mesh
from dilkit.integrations.transformers.masks import tokens_seen
from dilkit.integrations.transformers.patterns import Patterns, checked
from dilkit.pattern import Pattern

TAKEN = ("flash", "sdpa", "flex", "eager", "paged", "/", "|")
"""Parts of a name by which transformers takes another way."""
SWITCH = "switch_to_cb_friendly_attn"
"""The method that decides on the attention of a model; in a version without it transformers refuses ours."""


def register(pattern: Pattern | Sequence[Pattern] | None = None, name: str = "dilkit", *, mesh: Any = None) -> None:
    """Let models of transformers compute dilated attention: `attn_implementation=name`.

        out[i] = softmax_j(scaling * q_i . k_j + log count[h, i, j]) . v

    - `pattern`: a `dilkit.Pattern` for all layers, or a list with one for each, of models whose configuration names none. One
      that does, `config.dilkit`, the JSON of `Pattern.to_json` as an object, or a list of them, which is saved and loaded with
      the model, comes first. Without either, a model with windows computes its own: `Pattern.mistral(config.sliding_window)` in
      layers of `sliding_attention`, or in all where the configuration names no `layer_types`, and `Pattern.dense()` in others.
    - `name`: several names may be registered, each with patterns of its own; of one name the latest registration rules.
    - `mesh`: the `DeviceMesh` of one dimension, or the process group, that heads are shared out over in equal parts, by rank. It
      is needed where layers get a part of the heads, the pattern differs by head, and their weights are no DTensors that show
      which: under DeepSpeed's Ulysses, or tensor parallelism that is neither `tp_plan="auto"` nor torch's `parallelize_module`.

    Padding, on either side, is left out of the sequences, packed batches (`position_ids`, `cu_seq_lens_q`) are cut, and each
    sequence gets what it would get alone; so it does from a `DynamicCache` or `StaticCache`, in `generate`, also where these
    keep a window alone and the pattern sees no more. Attention sinks (`s_aux`), capped scores and T5's position bias take part;
    the cross-attention of T5 is torch's. Refused, with the reason: other position biases and cross-attention, masks other than
    padding; a part of the model's heads, where the pattern differs by head and neither the weights nor `mesh` say which; and,
    when a model is made or loaded, one that does not look its attention up by name. For this, and to say so where a model with
    `config.dilkit` is loaded with other attention, `PreTrainedModel.get_correct_attn_implementation` is wrapped; so is
    `ContinuousBatchingManager.switch_to_cb_friendly_attn`, so that `generate_batch` takes these models as they are, and
    `PagedAttentionCache.update`, so that they read its pool where it lies.

    Raises TypeError or ValueError for arguments that do not fit, and ImportError without transformers
    (`pip install dilkit[transformers]`).

    Example, a tiny model of random weights:

        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from dilkit import Pattern
        >>> from dilkit.integrations.transformers import register
        >>> register(Pattern([16, 64], [1, 4]))
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="dilkit")).eval()
        >>> tokens = torch.randint(3, 100, (1, 50))
        >>> model(tokens).logits.shape
        torch.Size([1, 50, 100])
        >>> model.generate(tokens, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0).shape
        torch.Size([1, 55])
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} is a {type(name).__name__}; a text is needed, such as 'dilkit'")
    if not name or any(part in name for part in TAKEN):
        raise ValueError(
            f"name={name!r} must not be empty or contain {', '.join(map(repr, TAKEN))}: transformers reads meaning into them"
        )
    patterns, package = None if pattern is None else checked(pattern), transformers()
    check_mesh(mesh)
    package.AttentionInterface.register(name, functools.partial(attend, patterns, mesh))
    package.AttentionMaskInterface.register(name, functools.partial(tokens_seen, patterns))
    watch_models(package.PreTrainedModel, is_registered)
    _watch_managers()


def is_registered(name: object) -> bool:
    """True if `name` is registered."""
    return getattr(_function(name), "func", None) is attend


def patterns_registered(name: object) -> Patterns | None:
    """Return the patterns that `name` was registered with."""
    patterns: Patterns | None = _function(name).args[0] if is_registered(name) else None
    return patterns


def _function(name: object) -> Any:
    return transformers().AttentionInterface().get(name)


def transformers() -> Any:
    """Return the package. Raises ImportError with the way to install it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"transformers cannot be imported ({error}); install it with: pip install dilkit[transformers]"
        ) from error


def _watch_managers() -> None:
    """Have the manager of continuous batching leave the attention of a model as it is where it is ours; once is enough.

    It knows "eager", "sdpa" and flash attention by name. It replaces others by flash attention, or refuses without it.
    """
    package = importlib.import_module("transformers.generation.continuous_batching")
    manager: Any = package.ContinuousBatchingManager
    switch = getattr(manager, SWITCH, None)
    if switch is None or getattr(switch, "watched_by", None) == __name__:
        return
    _watch_pools(package.PagedAttentionCache)

    @functools.wraps(switch)
    def watched(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if not is_registered(model.config._attn_implementation):
            switch(self, model, *args, **kwargs)
        elif not model._supports_attention_backend:
            raise ValueError(
                f"{type(model).__name__} in continuous batching: its layers hand nothing on to the attention function, which "
                "would not see the pool (transformers says so by _supports_attention_backend=False); take generate"
            )

    watched.watched_by = __name__  # type: ignore[attr-defined]
    setattr(manager, SWITCH, watched)


def _watch_pools(pool: Any) -> None:
    """Have `pool.update` hand the pool itself on to our attention function, which reads and writes it.

    From transformers 5.24 on, each layer calls `update` before its attention, and it copies all keys out of the pool.
    """
    update = pool.update

    @functools.wraps(update)
    def watched(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_registered(self.config._attn_implementation):
            return update(self, key_states, value_states, *args, **kwargs)
        kwargs["kwargs"]["cache"] = self  # the options of the layer's call
        return key_states, value_states

    pool.update = watched
