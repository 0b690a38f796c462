"""`dilated_cache`: a cache for models of transformers that stores only the rows that later ones can still see.

model: key, value of the new tokens -> `DilatedLayer.update` -> the same, with the layer beside them
attention: query, key, value        -> `DilatedLayer.attend` -> `DilatedCache.attend`
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from dilkit.checks import integer


def dilated_cache(rollback: int = 0) -> Any:
    """Make an empty cache for `generate(past_key_values=...)`: each layer makes a `dilkit.DilatedCache` at its first tokens.

    It keeps what the pattern of the layer needs: of segments the open one, of windows the last rows, global tokens for ever. All
    sequences of a batch have the same length: padding is refused. There are no gradients, and no `torch.compile`.

    - `rollback`: how many tokens drafts of speculative decoding may have, that are taken back: `prompt_lookup_num_tokens`, with
      the one that goes before them, or `num_assistant_tokens` of an assistant, whose schedule is to be "constant".

    Raises TypeError or ValueError, and ImportError without transformers. Example:

        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from dilkit import Pattern
        >>> from dilkit.integrations.transformers import dilated_cache, register
        >>> register(Pattern.streaming_llm(window=12, sinks=4))
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="dilkit")).eval()
        >>> cache = dilated_cache()
        >>> options = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
        >>> text = model.generate(torch.randint(3, 100, (1, 50)), past_key_values=cache, **options)
        >>> [layer.cache.allocated_nbytes for layer in cache.layers]  # 16 tokens of 4 heads of 8 numbers, keys and values
        [4096, 4096]
    """
    count = integer("rollback", rollback, at_least=0)
    from dilkit.integrations.transformers.registration import transformers

    transformers()
    layers = importlib.import_module("dilkit.integrations.transformers.dilated_layer")
    return importlib.import_module("transformers.cache_utils").Cache(
        layer_class_to_replicate=partial(layers.DilatedLayer, rollback=count)
    )
