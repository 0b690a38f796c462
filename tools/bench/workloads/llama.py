"""Models of Llama's shape with random weights: one for prefill, and transformers' own, which writes tokens after a long text.

tokens -> embedding -> 8 x [x + attention(norm(x)), x + down(silu(gate(norm x)) * up(norm x))] -> norm -> logits of the last row
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dilkit import dilated_attention
from dilkit.integrations.transformers import dilated_cache, register
from dilkit.pattern import Pattern
from dilkit.rotary import rotary_embedding
from dilkit.tools.measure.case import CaseFields, agreement, call_once, checked, in_turns
from dilkit.tools.measure.timing import Call
from dilkit.tools.results.record import Entries, Entry

OURS, DENSE, REST = "dilkit", "torch, dense", "without attention"
DILATED, DYNAMIC = "dilated_cache()", "DynamicCache, sdpa"
NAME = "dilkit_bench"
MISSING = "transformers is not installed: pip install dilkit[transformers]"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of `(batch, seq, heads, head_dim)` to keys and values with fewer heads; the result like the queries."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; a head has `width // heads` numbers."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 1376
    vocabulary: int = 32000


def prefill(config: LlamaConfig, pattern: Pattern, prompt: int, beginning: int, repeats: int) -> CaseFields:
    """Time a prompt of random tokens with each attention, and with none. They are checked on so many of its beginning."""
    model, tokens = Llama(config), torch.randint(config.vocabulary, (1, prompt))
    pairs = {OURS: (dilated(pattern), dilated(pattern, "reference")), DENSE: (dense, dilated(Pattern.dense()))}
    calls = {name: partial(model.prefill, tokens, attend) for name, (attend, _) in pairs.items()}
    entries: Entries = {}
    for name, both in pairs.items():
        logits, same = (model.prefill(tokens[:, :beginning], attend) for attend in both)
        entries[name] = call_once(calls[name]).remembered(checked([agreement(name, logits, same, beginning)]))
    calls[REST], entries[REST] = partial(model.prefill, tokens, lambda query, key, value: query), Entry()
    return in_turns(entries, calls, repeats)


class LlamaBlock(nn.Module):
    """One layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        linear, keys = partial(nn.Linear, bias=False), config.kv_heads * self.head_dim
        self.input_norm, self.norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.query, self.out = linear(config.width, config.width), linear(config.width, config.width)
        self.key, self.value = linear(config.width, keys), linear(config.width, keys)
        self.gate, self.up = linear(config.width, config.hidden), linear(config.width, config.hidden)
        self.down = linear(config.hidden, config.width)

    def forward(self, x: Tensor, attend: Attention) -> Tensor:
        """`x` `(batch, seq, width)` after the layer, written over it: without gradients nothing of a layer has to be kept."""
        rows = self.input_norm(x)
        query, key, value = (one(rows).unflatten(-1, (-1, self.head_dim)) for one in (self.query, self.key, self.value))
        x += self.out(attend(rotary_embedding(query), rotary_embedding(key), value).flatten(2))
        rows = self.norm(x)
        x += self.down(F.silu(self.gate(rows), inplace=True).mul_(self.up(rows)))
        return x


class Llama(nn.Module):
    """The model, with the same weights whenever it is made."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm, self.logits = nn.RMSNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, attend: Attention) -> Tensor:
        """Logits `(batch, vocabulary)` of what follows on `tokens` `(batch, seq)`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, attend)
        logits: Tensor = self.logits(self.norm(x[:, -1]))
        return logits


def dilated(pattern: Pattern, backend: str | None = None) -> Attention:
    """Return attention of dilkit."""
    return cast(Attention, partial(dilated_attention, pattern=pattern, is_causal=True, backend=backend))


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention of torch. Keys and values are repeated for the queries of a group: then its fused kernel takes them."""
    group = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def generated(config: LlamaConfig, kv_heads: int, pattern: Pattern, seen: int, count: int, repeats: int) -> CaseFields:
    """Time `count` tokens after `seen`, with a cache of all and with what `pattern` needs. Refused without transformers.

    Each model has read all tokens but the last. Its logits of that one are compared with those of all tokens computed anew.
    """
    if not find_spec("transformers"):
        return in_turns({name: Entry(verdict="refused", reasons=(MISSING,)) for name in (DILATED, DYNAMIC)}, {}, repeats)
    transformers: Any = importlib.import_module("transformers")
    tokens = torch.randint(1, config.vocabulary, (1, seen), generator=torch.Generator().manual_seed(seen))
    sizes = dict(hidden_size=config.width, intermediate_size=config.hidden, num_hidden_layers=config.layers)
    sizes |= dict(num_attention_heads=config.heads, num_key_value_heads=kv_heads, vocab_size=config.vocabulary)
    register(pattern, NAME)
    caches: dict[str, Any] = {DILATED: dilated_cache(rollback=count + 1), DYNAMIC: transformers.DynamicCache()}
    options = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    entries: Entries = {}
    calls: dict[str, Call] = {}
    for (name, cache), attention in zip(caches.items(), (NAME, "sdpa"), strict=True):
        torch.manual_seed(0)
        of_model = transformers.LlamaConfig(**sizes, max_position_embeddings=seen + count, attn_implementation=attention)
        model = transformers.LlamaForCausalLM(of_model).eval()
        with torch.no_grad():
            model(tokens[:, :-1], past_key_values=cache, logits_to_keep=1)
            over_cache = model(tokens[:, -1:], past_key_values=cache).logits
            anew = model(tokens, use_cache=False, logits_to_keep=1).logits
        entries[name] = checked([agreement("logits", over_cache, anew, seen)])
        calls[name] = partial(model.generate, tokens, past_key_values=cache, **options)

    def take_back() -> None:
        for cache in caches.values():
            if written := cache.get_seq_length() - (seen - 1):
                cache.crop(-written)

    return in_turns(entries, calls, repeats, before=take_back)
