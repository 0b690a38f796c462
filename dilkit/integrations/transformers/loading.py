"""`load`: a saved model with the attention that its configuration has a pattern for."""

from __future__ import annotations

from typing import Any

from dilkit.integrations.transformers.registration import is_registered, register, transformers


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
