"""transformers' Llama with random weights: it reads a long prompt, and writes tokens after a long text."""

import importlib
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dilkit import use_backend
from dilkit.integrations.transformers import dilated_cache, register
from dilkit.pattern import Pattern
from dilkit.tools.measure.case import CaseFields, agreement, call_once, checked, in_turns
from dilkit.tools.measure.timing import Call
from dilkit.tools.results.rows import Entries, ResultRow

OURS, DENSE = "dilkit", "torch, dense"
DILATED, DYNAMIC = "dilated_cache()", "DynamicCache, sdpa"
NAME = "dilkit_bench"
MISSING = "transformers is not installed: pip install dilkit[transformers]"
SIZES = dict(num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=1376, vocab_size=32000)
"""Sizes of the model in transformers' words, but for its key/value heads."""


class Llama:
    """A model with the same weights whenever it is made, that computes attention by the name that each call gives."""

    def __init__(self, sizes: Mapping[str, int], kv_heads: int, longest: int) -> None:
        transformers: Any = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=kv_heads, max_position_embeddings=longest)
        self.model = transformers.LlamaForCausalLM(config).eval()
        self.full_cache = transformers.DynamicCache

    @torch.no_grad()
    def logits(self, attention: str, tokens: Tensor, **options: Any) -> Tensor:
        """Return the logits `(batch, 1, vocabulary)` of what follows `tokens` `(batch, seq)`."""
        self.model.set_attn_implementation(attention)
        logits: Tensor = self.model(tokens, logits_to_keep=1, **options).logits
        return logits

    def generate(self, attention: str, tokens: Tensor, **options: Any) -> Any:
        self.model.set_attn_implementation(attention)
        return self.model.generate(tokens, do_sample=False, pad_token_id=0, **options)


def _refused(*names: str) -> CaseFields | None:
    if find_spec("transformers"):
        return None
    return in_turns({name: ResultRow(verdict="refused", reasons=(MISSING,)) for name in names}, {}, 1)


def prefill(sizes: Mapping[str, int], kv_heads: int, pattern: Pattern, prompt: int, beginning: int, repeats: int) -> CaseFields:
    """Time a prompt of random tokens with each attention. They are checked on so many of its beginning."""
    if refused := _refused(OURS, DENSE):
        return refused
    register(pattern, NAME)
    llama, tokens = Llama(sizes, kv_heads, prompt), torch.randint(1, sizes["vocab_size"], (1, prompt))
    first = partial(llama.logits, tokens=tokens[:, :beginning], use_cache=False)
    with use_backend("reference"):
        exact = {OURS: first(NAME), DENSE: first("eager")}
    entries: Entries = {}
    calls: dict[str, Call] = {}
    for name, attention in ((OURS, NAME), (DENSE, "sdpa")):
        calls[name] = partial(llama.logits, attention, tokens, use_cache=False)
        check = agreement(name, first(attention), exact[name], beginning)
        entries[name] = checked([check], call_once(calls[name])[1])
    return in_turns(entries, calls, repeats)


def generated(sizes: Mapping[str, int], kv_heads: int, pattern: Pattern, seen: int, count: int, repeats: int) -> CaseFields:
    """Time `count` tokens after `seen`, with a cache of all and with what `pattern` needs.

    Each has read all tokens but the last. Its logits of that one are compared with those of all tokens computed again.
    """
    if refused := _refused(DILATED, DYNAMIC):
        return refused
    register(pattern, NAME)
    llama = Llama(sizes, kv_heads, seen + count)
    tokens = torch.randint(1, sizes["vocab_size"], (1, seen), generator=torch.Generator().manual_seed(seen))
    caches: dict[str, Any] = {DILATED: dilated_cache(rollback=count + 1), DYNAMIC: llama.full_cache()}
    entries: Entries = {}
    calls: dict[str, Call] = {}
    for (name, cache), attention in zip(caches.items(), (NAME, "sdpa"), strict=True):
        llama.logits(attention, tokens[:, :-1], past_key_values=cache)
        over_cache = llama.logits(attention, tokens[:, -1:], past_key_values=cache)
        anew = llama.logits(attention, tokens, use_cache=False)
        entries[name] = checked([agreement("logits", over_cache, anew, seen)])
        lengths = dict(max_new_tokens=count, min_new_tokens=count)
        calls[name] = partial(llama.generate, attention, tokens, past_key_values=cache, **lengths)

    def take_back() -> None:
        for cache in caches.values():
            if written := cache.get_seq_length() - (seen - 1):
                cache.crop(-written)

    return in_turns(entries, calls, repeats, before=take_back)
