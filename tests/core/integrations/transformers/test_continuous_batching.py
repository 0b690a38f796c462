"""`generate_batch`: what each prompt gets alone, from the pool of transformers' continuous batching."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, WINDOWED, deepseek, gpt_oss, llama, qwen3, result, sequences, transformers
from torch import Tensor
from torch.testing import assert_close

from dilkit import DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided

package = transformers()
from dilkit.integrations.transformers import register  # noqa: E402

PagedAttentionCache = package.generation.continuous_batching.PagedAttentionCache
if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
    pytest.skip("the pool of transformers before 5.19 is refused", allow_module_level=True)
STEPS = 12
MIXED = Pattern.of(DilatedSegment(16, 2), SlidingWindow(4), GlobalTokens([0, 11, 30]))
ONCE = Pattern.of(SlidingWindow(5), GlobalTokens([0, 3, 4, 20], "read"), Strided(4), overlap="once")
CASES = {
    "segments": (partial(llama, num_attention_heads=8, num_key_value_heads=4), PATTERN),
    "windows, sinks": (WINDOWED["gpt_oss"], None),
    "mixed": (llama, MIXED),
    "once": (llama, ONCE),
    "dense": (llama, Pattern.dense()),
    "segments, sinks": (gpt_oss, PATTERN),
    "normed keys": (qwen3, PATTERN),
    **{name: (WINDOWED[name], None) for name in ("mistral", "gemma2", "gemma3", "qwen2")},
}
QUICK = ("segments", "windows, sinks", "once")


def prompts() -> list[Tensor]:
    """Shorter and longer than a batch of 16 rows; the last begins as another does, whose pages it shares."""
    parts = sequences((5, 16, 23, 1))
    return [*parts, torch.cat((parts[2][:20], parts[0]))]


def generated(model, parts: list[Tensor]) -> list[Any]:
    greedy = package.GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pool = package.ContinuousBatchingConfig(num_blocks=48, page_size=4, max_batch_tokens=16, return_logprobs=True)
    tokens = [part.tolist() for part in parts]
    return list(model.generate_batch(tokens, generation_config=greedy, continuous_batching_config=pool).values())


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES])
def test_each_prompt_goes_on_as_it_would_alone(case):
    make, pattern = CASES[case]
    register(pattern)
    model, parts = make(attn_implementation="dilkit"), prompts()
    outs = generated(model, parts)
    assert [out.error for out in outs] == [None] * len(parts)
    for part, out in zip(parts, outs, strict=True):
        new = torch.tensor(out.generated_tokens)
        with torch.no_grad():
            alone = result(model, input_ids=torch.cat((part, new))[None])[0, len(part) - 1 : -1].log_softmax(-1)
        assert torch.equal(alone.argmax(-1), new)
        assert_close(torch.tensor(out.logprobs).exp(), alone.max(-1).values.exp(), atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == "dilkit"


def test_other_models_keep_the_way_of_transformers():
    manager = package.generation.continuous_batching.ContinuousBatchingManager
    register(PATTERN)
    ours, eager = (llama(attn_implementation=name) for name in ("dilkit", "eager"))
    for model in (ours, eager):
        manager.switch_to_cb_friendly_attn(SimpleNamespace(_original_attn_impl=None), model, False)
    assert (ours.config._attn_implementation, eager.config._attn_implementation) == ("dilkit", "paged|eager")


def test_what_is_not_computed_is_the_error_of_a_request():
    register(Pattern.mistral(7))
    wide = generated(WINDOWED["mistral"](attn_implementation="dilkit"), sequences((5,)))
    assert "the pool keeps the last 5 tokens of layers with a window, but the pattern of layer 0 is" in wide[0].error
    register(PATTERN)
    narrow = generated(deepseek(attn_implementation="dilkit"), sequences((5,)))
    assert "has rows of (4, 4), (kv_heads, head_dim) by the configuration, but layer 0 has keys of (4, 8)" in narrow[0].error


def test_layers_that_would_not_see_the_pool():
    register(Pattern.dense())
    bloom = package.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64, attn_implementation="dilkit")
    with pytest.raises(ValueError, match="BloomForCausalLM in continuous batching: its layers hand nothing on"):
        generated(package.BloomForCausalLM(bloom), sequences((5,)))


class Allocator:
    index, layer_type, written = 0, "full_attention", 0

    def __init__(self):
        rows = torch.zeros(2, 32, 2, 8)
        self._kv_token_views = dict.fromkeys((0, 1), (rows[0], rows[1]))

    def update(self, key: Tensor, value: Tensor, *_):
        self.written += 1


class Pool(PagedAttentionCache):
    """One sequence of 6 tokens in a pool, after which 2 come, and a new one of 3."""

    def __init__(self, config):
        self.config, self.allocator = config, Allocator()
        self.layer_to_allocator = dict.fromkeys((0, 1), self.allocator)

    def batch(self) -> dict[str, Any]:
        ends, keys = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 8, 11]))
        index = [torch.arange(11) + 4]
        of_keys = {Allocator.layer_type: keys}
        return dict(cache=self, cu_seq_lens_q=ends, cu_seq_lens_k=of_keys, read_index=index, write_index=index)


def test_malformed_batches_are_refused_and_nothing_is_written():
    register(PATTERN)
    model, tokens = llama(attn_implementation="dilkit"), torch.full((1, 5), 7)
    pool = Pool(model.config)

    def refused(kind, words, rows=tokens, **changed):
        with pytest.raises(kind, match=words), torch.no_grad():
            model(rows, use_cache=False, position_ids=torch.arange(5)[None], **(pool.batch() | changed))

    ends = torch.tensor([0, 2, 4], dtype=torch.int32)
    refused(ValueError, r"cu_seq_lens_q=\[0, 2, 4\] of 5 rows; from 0 to 5", cu_seq_lens_q=ends)
    refused(ValueError, "do not fit one batch: ascending", cu_seq_lens_k=dict(full_attention=ends))
    refused(ValueError, "a read_index of 3 do not fit one batch", read_index=[torch.arange(3)])
    refused(ValueError, r"pages\[0\]=-4 must be at least 0", read_index=[torch.arange(11) - 4])
    refused(ValueError, r"keys of page 34, .*beyond the 512 elements", read_index=[torch.arange(11) + 29])
    refused(TypeError, "cache=Pool, and the arguments beside it, .*is not subscriptable", cu_seq_lens_k=None)
    empty = Pool(model.config)
    empty.layer_to_allocator = {}
    refused(TypeError, "cache=Pool, and the arguments beside it, .*KeyError", cache=empty)
    refused(ValueError, "has a batch of 2; the rows of all", tokens.expand(2, 5))
    refused(ValueError, "block_table of LlamaAttention, which is not read", block_table=torch.zeros(1))
    with pytest.raises(ValueError, match=r"decode under torch\.no_grad"):
        model(tokens, use_cache=False, position_ids=torch.arange(5)[None], **pool.batch())
    model.config.attention_dropout = 0.5
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = 0.5
    refused(ValueError, "must be causal and without dropout")
    assert pool.allocator.written == 0


def test_tables_are_made_anew_where_a_batch_has_been_written_to():
    register(PATTERN)
    model, tokens = llama(attn_implementation="dilkit"), torch.full((1, 5), 7)
    pool = Pool(model.config)
    batch = pool.batch()
    for x in pool.allocator._kv_token_views[0]:
        x.copy_(torch.randn_like(x))

    def logits():
        return result(model, input_ids=tokens, position_ids=torch.tensor([[6, 7, 0, 1, 2]]), use_cache=False, **batch)

    def anew():
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"].clone()
        return logits()

    with torch.no_grad():
        first = logits()
        batch["cu_seq_lens_k"]["full_attention"][1:] -= 2
        second = logits()
        assert not torch.allclose(first[:, :2], second[:, :2])
        assert torch.equal(second, anew())
        batch["read_index"] = [torch.arange(11) + 13]
        third = logits()
        assert not torch.allclose(second[:, :2], third[:, :2])
        assert torch.equal(third, anew())
