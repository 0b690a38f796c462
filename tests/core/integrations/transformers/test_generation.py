"""Tokens one by one, from the caches of transformers: what the whole sequence gives."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers.language_models import LENGTHS, MODELS, PATTERN, llama, padded, result, sequences, transformers
from helpers.pairwise import every_pair
from torch.testing import assert_close

package = transformers()
from dilkit.integrations.transformers import convert, register  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=2e-5)
STEPS = 20
WAYS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=1.5),
    "beams": dict(do_sample=False, num_beams=3),
}


QUICK = ("llama", "gpt_oss")
"""With grouped heads, and with sinks; the others are marked slow."""
CAUSAL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS if name != "bert"]
OTHERS = [name for name in MODELS if name not in ("bert", *QUICK)]
KINDS = ("dynamic", "static")


def each_model(*axes: Any) -> list[Any]:
    """Every pair with the quick models by default, and all of the product with the others marked slow."""
    slow = [pytest.param(*row, marks=pytest.mark.slow) for row in product(OTHERS, *axes)]
    return [*every_pair(QUICK, *axes), *slow]


@pytest.fixture(params=CAUSAL)
def model(request: pytest.FixtureRequest) -> Any:
    register(PATTERN)
    return MODELS[request.param](attn_implementation="dilkit")


def cache_of(kind: str, model: Any, capacity: int) -> Any:
    return package.DynamicCache() if kind == "dynamic" else package.StaticCache(config=model.config, max_cache_len=capacity)


CHUNKS = ((7, 1, 1, 1, 1, 1, 1, 1, 1, 1), (1, 14, 1), (5, 6, 5))


@pytest.mark.parametrize(("model", "kind", "chunks"), each_model(KINDS, CHUNKS), ids=str, indirect=["model"])
def test_chunks_against_a_cache(model: Any, kind: str, chunks: tuple[int, ...]) -> None:
    tokens = torch.stack(sequences((sum(chunks),)) * 2)
    cache, outs, start = cache_of(kind, model, 32), [], 0
    with torch.no_grad():
        for rows in chunks:
            own = dict(input_ids=tokens[:, start : start + rows], position_ids=torch.arange(start, start + rows)[None])
            outs.append(result(model, **own, past_key_values=cache))
            start += rows
        assert_close(torch.cat(outs, 1), result(model, input_ids=tokens), **CLOSE)


@pytest.mark.parametrize(("model", "kind", "way"), each_model(KINDS, WAYS), indirect=["model"])
def test_generation_from_a_left_padded_batch(model: Any, kind: str, way: str) -> None:
    """Each sequence goes on as it would alone, by every token that was generated."""
    batch = padded(sequences(), "left")
    del batch["position_ids"]
    cache = cache_of(kind, model, max(LENGTHS) + STEPS)
    options = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=0, past_key_values=cache)
    made = model.generate(**batch, **options, **WAYS[way], return_dict_in_generate=True, output_logits=way != "beams")
    if way == "beams":
        return check_beams(model, made.sequences)
    logits = torch.stack(made.logits, 1)
    for row, length, found in zip(made.sequences, LENGTHS, logits, strict=True):
        with torch.no_grad():
            whole = result(model, input_ids=row[None, max(LENGTHS) - length :])[0]
        assert_close(found, whole[length - 1 : -1], **CLOSE)
    return None


def check_beams(model: Any, made: torch.Tensor) -> None:
    options = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=0, **WAYS["beams"])
    for row, part in zip(made, sequences(), strict=True):
        assert torch.equal(row[-STEPS:], model.generate(part[None], **options)[0, -STEPS:])


def test_a_prompt_padded_on_the_right_goes_on(model: Any) -> None:
    """The padding then lies between the tokens of a sequence."""
    parts = sequences((5, 12))
    batch, cache = padded(parts, "right"), package.DynamicCache()
    new = torch.tensor([[7], [8]])
    with torch.no_grad():
        result(model, **batch, past_key_values=cache)
        mask = torch.cat((batch["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
        out = result(model, input_ids=new, attention_mask=mask, position_ids=torch.tensor([[5], [12]]), past_key_values=cache)
        for found, part, token in zip(out, parts, new, strict=True):
            assert_close(found[0], result(model, input_ids=torch.cat((part, token))[None])[0, -1], **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_in_chunks_with_padding_on_the_left(model: Any, kind: str) -> None:
    """A chunk may hold padding, and one sequence none of its tokens yet."""
    parts = sequences((3, 20))
    batch = padded(parts, "left")
    cache, outs = cache_of(kind, model, 32), []
    with torch.no_grad():
        for start, stop in ((0, 8), (8, 18), (18, 20)):
            own = {name: batch[name][:, start:stop] for name in ("input_ids", "position_ids")}
            outs.append(result(model, **own, attention_mask=batch["attention_mask"][:, :stop], past_key_values=cache))
        out = torch.cat(outs, 1)
        for found, part in zip(out, parts, strict=True):
            assert_close(found[-len(part) :], result(model, input_ids=part[None])[0], **CLOSE)


def test_gradients_after_a_cached_prefix() -> None:
    register(PATTERN)
    model, tokens = llama(attn_implementation="dilkit"), sequences((20,))[0][None]
    cache = package.DynamicCache()
    first = result(model, input_ids=tokens[:, :9], past_key_values=cache)
    second = result(model, input_ids=tokens[:, 9:], past_key_values=cache)
    torch.cat((first, second), 1).square().sum().backward()
    found = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    result(model, input_ids=tokens).square().sum().backward()
    for name, x in model.named_parameters():
        assert_close(found[name], x.grad, atol=1e-4, rtol=1e-4)


def test_gpt_2_with_a_static_cache() -> None:
    """It flattens masks of fewer than four dimensions, also the one that `generate` has made."""
    sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    model, batch = package.GPT2LMHeadModel(package.GPT2Config(**sizes)).eval(), padded(sequences(), "left")
    convert(model, PATTERN)
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    static, dynamic = (model.generate(**batch, **options, cache_implementation=kind) for kind in ("static", None))
    assert torch.equal(static, dynamic)
