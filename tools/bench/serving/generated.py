"""Tokens that a model of transformers generates after a long text, with its own full cache and with what a window needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers import dilated_cache, register
from dilkit.pattern import Pattern
from dilkit.tools.bench.serving.entries import checked, timed
from dilkit.tools.bench.serving.llama import LlamaConfig
from dilkit.tools.bench.serving.record import DILATED, DYNAMIC, Generated
from dilkit.tools.measure.single_call import agreement
from dilkit.tools.results.record import Entries, Entry

NAME = "dilkit_bench"
MISSING = "transformers is not installed: pip install dilkit[transformers]"


class Writer:
    """A model that has read all but the last of `tokens`, and writes `count` more, as often as it is asked."""

    def __init__(self, model: Any, cache: Any, tokens: Tensor, count: int) -> None:
        self.model, self.cache, self.tokens, self.count = model.eval(), cache, tokens, count
        with torch.no_grad():
            model(tokens[:, :-1], past_key_values=cache, logits_to_keep=1)

    def take_back(self) -> None:
        """Forget what was written."""
        written = self.cache.get_seq_length() - (self.tokens.shape[1] - 1)
        if written:
            self.cache.crop(-written)

    def write(self) -> Tensor:
        """The tokens, with those that were written."""
        options = dict(max_new_tokens=self.count, min_new_tokens=self.count, do_sample=False, pad_token_id=0)
        text: Tensor = self.model.generate(self.tokens, past_key_values=self.cache, **options)
        return text

    def logits(self) -> Tensor:
        """Of the last token, over the cache."""
        with torch.no_grad():
            logits: Tensor = self.model(self.tokens[:, -1:], past_key_values=self.cache).logits
        self.take_back()
        return logits

    def logits_without_cache(self) -> Tensor:
        """Of the last token, all computed anew."""
        with torch.no_grad():
            logits: Tensor = self.model(self.tokens, use_cache=False, logits_to_keep=1).logits
        return logits


def generated(config: LlamaConfig, kv_heads: int, pattern: Pattern, seen: int, count: int, repeats: int) -> Generated:
    """`count` tokens after `seen`; either cache is first compared with the model without one. Refused without transformers."""
    writers = dict(_writers(config, kv_heads, pattern, seen, count)) if find_spec("transformers") else {}
    entries: Entries = {name: Entry(verdict="refused", reasons=(MISSING,)) for name in (DILATED, DYNAMIC)}
    for name, one in writers.items():
        entries[name] = checked(agreement(name, one.logits(), one.logits_without_cache(), seen))

    def take_back() -> None:
        for one in writers.values():
            one.take_back()

    case = timed(entries, {name: one.write for name, one in writers.items()}, repeats, before=take_back)
    sizes = dict(layers=config.layers, width=config.width, heads=config.heads, kv_heads=kv_heads)
    return Generated(pattern=str(pattern), seen=seen, count=count, **sizes, **case)


def _writers(config: LlamaConfig, kv_heads: int, pattern: Pattern, seen: int, count: int) -> Iterator[tuple[str, Writer]]:
    tokens = torch.randint(1, config.vocabulary, (1, seen), generator=torch.Generator().manual_seed(seen))
    register(pattern, NAME)
    caches = {DILATED: (NAME, dilated_cache(rollback=count + 1)), DYNAMIC: ("sdpa", _transformers().DynamicCache())}
    for name, (attention, cache) in caches.items():
        yield name, Writer(_model(config, kv_heads, attention, seen + count), cache, tokens, count)


def _model(config: LlamaConfig, kv_heads: int, attention: str, longest: int) -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=config.width, intermediate_size=config.hidden, num_hidden_layers=config.layers)
    heads = dict(num_attention_heads=config.heads, num_key_value_heads=kv_heads, vocab_size=config.vocabulary)
    of_config = partial(_transformers().LlamaConfig, **sizes, **heads, max_position_embeddings=longest)
    return _transformers().LlamaForCausalLM(of_config(attn_implementation=attention))


def _transformers() -> Any:
    return importlib.import_module("transformers")
