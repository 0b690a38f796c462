"""`register`: the names that transformers looks dilated attention up by, and its hooks for continuous batching."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dilkit.checks import check_type
from dilkit.compiler import assume_constant_result
from dilkit.integrations.newer import check_class
from dilkit.integrations.transformers.across import watch_layers
from dilkit.integrations.transformers.attention import attend
from dilkit.integrations.transformers.biases.alibi import watch_alibi
from dilkit.integrations.transformers.biases.local import watch_local
from dilkit.integrations.transformers.biases.tables import watch_tables
from dilkit.integrations.transformers.checks import TAKEN, class_tables, source_of
from dilkit.integrations.transformers.heads import check_mesh
from dilkit.integrations.transformers.masks import tokens_seen
from dilkit.integrations.transformers.patterns import Patterns, checked
from dilkit.pattern import Pattern

SWITCH = "switch_to_cb_friendly_attn"
"""The method that decides on the attention of a model; in a version without it transformers refuses ours."""


def register(pattern: Pattern | str | Sequence[Pattern | str] | None = None, name: str = "dilkit", *, mesh: Any = None) -> None:
    """Let models of transformers compute dilated attention: `attn_implementation=name`.

        out[i] = softmax_j(scaling * q_i . k_j + log count[h, i, j]) . v

    - `pattern`: a `dilkit.Pattern` for all layers, or a list with one for each, of models whose configuration names none; a text
      as the command's `--pattern` takes it, such as "longformer(512, 16)", makes one. `config.dilkit`, the JSON of
      `Pattern.to_json` as an object, or a list of them, which is saved and loaded with the model, comes first. Without either,
      each layer computes what its model was made for: a window, on both sides of a token in encoders, chunks, or all tokens.
    - `name`: several names may be registered, each with patterns of its own; of one name the latest registration rules.
    - `mesh`: the `DeviceMesh` of one dimension, or the process group, that heads are shared out over in equal parts, by rank. It
      is needed where layers get a part of the heads, the pattern differs by head, and their weights are no DTensors that show
      which: under DeepSpeed's Ulysses, or tensor parallelism that is neither `tp_plan="auto"` nor torch's `parallelize_module`.

    Padding is left out of the sequences, packed batches (`position_ids`, `cu_seq_lens_q`) are cut, and each sequence gets what it
    would get alone, also from a `DynamicCache` or `StaticCache`. Attention sinks (`s_aux`), capped scores and T5's position bias
    take part. Layers whose keys are of another sequence see all of its tokens, whatever the pattern. Refused, with the reason:
    other position biases, masks of more than four runs of keys a row, and, when a model is made or loaded, one that does not
    look its attention up by name. For this the `forward` of layers that may attend to another sequence is wrapped, and
    `PreTrainedModel.get_correct_attn_implementation` is wrapped; so are `ContinuousBatchingManager.switch_to_cb_friendly_attn`
    and `PagedAttentionCache.update`, so that `generate_batch` takes these models as they are.

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
    check_type("name", name, str, "a text is needed, such as 'dilkit'")
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


@assume_constant_result
def is_registered(name: object) -> bool:
    return getattr(_function(name), "func", None) is attend


def patterns_registered(name: object) -> Patterns | None:
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
    """Have the manager of continuous batching leave our attention as it is: it replaces unknown names by flash attention."""
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
    """Have `pool.update` hand itself on to our attention function, which reads and writes it.

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


def load(source: Any, **options: Any) -> Any:
    """Load the model of `source`, a folder or a name on the Hub, with the pattern of its files, `config.dilkit`.

    Its class is the one that it was saved as. `options` are those of `from_pretrained` of that class, such as `dtype`,
    `device_map` or `tp_plan`. The name of the attention is the one that it was saved with, "dilkit" where its files have none
    (those of models that were saved by transformers alone), and is registered if it is not.

    Raises ValueError for a configuration without a pattern, or of a class that this version of transformers does not have;
    OSError, by transformers, where there is no model.

        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from dilkit import Pattern
        >>> from dilkit.integrations.transformers import convert, load
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> _ = convert(model, Pattern([16, 64], [1, 4]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     again = load(folder)
        >>> again.config._attn_implementation, again.config.dilkit["segment_lengths"]
        ('dilkit', [16, 64])
    """
    package = transformers()
    config = package.AutoConfig.from_pretrained(source)
    if getattr(config, "dilkit", None) is None:
        raise ValueError(
            f"the configuration of {str(source)!r} has no pattern, config.dilkit; load the model by from_pretrained, and give it "
            "one by convert(model, pattern)"
        )
    names = getattr(config, "architectures", None) or ()
    kind = next((getattr(package, name) for name in names if hasattr(package, name)), None)
    if kind is None:
        raise ValueError(
            f"the configuration of {str(source)!r} says that it is of {list(names) or 'no class'}, which transformers "
            f"{package.__version__} does not have; load it by from_pretrained of its class"
        )
    name = options.pop("attn_implementation", config._attn_implementation or "dilkit")
    if not is_registered(name):
        register(None, name)
    return kind.from_pretrained(source, attn_implementation=name, **options)


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
            for table, classes in class_tables(type(model)).items():
                classes[str(requested_attention)] = functools.partial(_refuse_class, table, tuple(classes))
            watch_layers(type(model))
            watch_tables(type(model), is_ours)
            watch_local(type(model), is_ours)
            check_proven(type(model))
            if getattr(model.config, "dilkit", None) is not None:
                setattr(model.config, SAVED_AS, requested_attention)
        elif requested_attention is None and getattr(model.config, "dilkit", None) is not None:
            warnings.warn(
                f"the configuration of this {type(model).__name__} has a pattern for dilated attention, config.dilkit, but no "
                "attn_implementation: it computes transformers' own attention. Give attn_implementation='dilkit', or delete "
                "config.dilkit",
                stacklevel=2,
            )
        return decide(model, requested_attention, *args, **kwargs)

    watched.watched_by = __name__  # type: ignore[attr-defined]
    base.get_correct_attn_implementation = watched


def check_proven(kind: Any) -> None:
    """Raise ValueError for a class of an untested transformers, or one derived from it, if it is wrong on dilated attention."""
    base = next((x for x in kind.__mro__ if x.__module__.startswith("transformers.models.")), kind)
    check_class("transformers", sys.modules["transformers"].__version__, base, "dilkit.integrations.transformers.proof.proving")


def classes_with(model: Any, layers: Iterable[Any]) -> dict[Any, None]:
    """Return the classes of `model`, and of the models within it, that hold one of the `layers`; the outermost comes first."""
    wanted = {*map(id, layers)}
    models = (x for x in model.modules() if hasattr(x, "set_attn_implementation"))
    return {type(x): None for x in models if not wanted.isdisjoint(map(id, x.modules()))}


def _check_looked_up(kind: Any, name: str | None) -> None:
    """Raise ValueError for a class of models that computes attention by itself; of one without source nothing is known."""
    if not kind._can_set_attn_implementation() and source_of(sys.modules.get(kind.__module__)):
        raise ValueError(
            f"attn_implementation={name!r}: {kind.__name__} does not look its attention up by name, so it would compute its own; "
            "use 'eager'. If it is a part of a larger model, name the attention of each part: "
            f"attn_implementation={{'text_config': {name!r}, 'vision_config': 'eager'}}"
        )


def _refuse_class(table: str, names: tuple[str, ...], config: Any, *_: Any, **__: Any) -> None:
    own = [name for name in names if not is_registered(name)]
    raise ValueError(
        f"attn_implementation={config._attn_implementation!r} of {type(config).__name__}: its layers are of a class by this "
        f"name, with its own attention; make or load the model with {' or '.join(own)}, of {table}, then convert it"
    )
