"""`dilated_cache` in `generate`: the tokens of a cache of all keys, from what later rows can still see."""

import pytest
import torch
from helpers.language_models import PATTERN, WINDOWED, llama, padded, sequences, transformers
from helpers.pairwise import diagonal

from dilkit import DilatedSegment, GlobalTokens, Pattern, SlidingWindow

package = transformers()
from dilkit.integrations.transformers import dilated_cache, register  # noqa: E402

STEPS = 24
OPTIONS = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0)
PROMPT = torch.stack(sequences((11, 11)))


@pytest.mark.parametrize(
    "name", ["mistral", "gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gpt_oss"))]
)
def test_windows_of_a_model_give_the_tokens_of_eager_attention(name):
    register(None)
    ours, eager = (WINDOWED[name](attn_implementation=kind) for kind in ("dilkit", "eager"))
    cache = dilated_cache()
    assert torch.equal(ours.generate(PROMPT, **OPTIONS, past_key_values=cache), eager.generate(PROMPT, **OPTIONS))
    window = cache.layers[0].cache
    assert window.allocated_nbytes == 2 * 2 * 2 * 6 * 8 * 4  # keys and values, of two sequences and heads, 6 tokens of 8 numbers
    assert window.seen == cache.get_seq_length() == 11 + STEPS - 1


PATTERNS = {
    "segments": PATTERN,
    "sinks": Pattern.streaming_llm(5, sinks=2),
    "mixed": Pattern.of(DilatedSegment(16, 2), SlidingWindow(4), GlobalTokens([0, 30])),
}


@pytest.mark.parametrize(("pattern", "way"), diagonal(PATTERNS, ["greedy", "beams", "looked up"]))
def test_patterns_give_the_tokens_of_a_cache_of_all_keys(pattern, way):
    register(PATTERNS[pattern])
    model = llama(attn_implementation="dilkit")
    more = dict(greedy={}, beams=dict(num_beams=3), **{"looked up": dict(prompt_lookup_num_tokens=2)})[way]
    prompt = PROMPT[:1].repeat(1, 2) if more else PROMPT
    found, wanted = (
        model.generate(prompt, **OPTIONS, **more, past_key_values=cache)
        for cache in (dilated_cache(rollback=3), package.DynamicCache())
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("pattern", [pytest.param(name, marks=() if name == "mixed" else pytest.mark.slow) for name in PATTERNS])
def test_drafts_of_an_assistant_are_taken_back(pattern):
    register(PATTERNS[pattern])
    model, rows = llama(attn_implementation="dilkit"), []
    wanted = model.generate(PROMPT[:1], **OPTIONS)
    model.lm_head.register_forward_hook(lambda *call: rows.append(call[2].shape[1]))
    found = model.generate(PROMPT[:1], **OPTIONS, assistant_model=assistant(), past_key_values=dilated_cache(rollback=3))
    assert torch.equal(found, wanted)
    assert len(rows) < STEPS < sum(rows)  # some drafts are taken, and some are not


def test_longer_drafts_than_the_cache_can_take_back():
    register(PATTERNS["segments"])
    model, cache = llama(attn_implementation="dilkit"), dilated_cache(rollback=1)
    with pytest.raises(ValueError, match=r"segments of \d+ tokens.* keeps no more.*; a cache with rollback=[23] does"):
        model.generate(PROMPT[:1], **OPTIONS, assistant_model=assistant(), past_key_values=cache)


def assistant():
    """A model that differs a little from that of `llama()`, and always drafts three tokens."""
    model = llama(attn_implementation="dilkit")
    with torch.no_grad():
        for x in model.parameters():
            x += 0.004 * torch.randn_like(x)
    drafts = dict(num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    model.generation_config.update(**drafts)
    return model


def test_what_it_is_not_for_is_refused():
    register(PATTERN)
    model, sdpa = (llama(attn_implementation=name) for name in ("dilkit", "sdpa"))
    batch, cache = padded(sequences((3, 9)), "left"), dilated_cache()
    del batch["position_ids"]
    with pytest.raises(ValueError, match="attention_mask has padding, but all sequences of a dilated_cache"):
        model.generate(**batch, **OPTIONS, past_key_values=cache)
    model.generate(PROMPT, **OPTIONS, past_key_values=cache)  # it is as it was
    with torch.no_grad():
        model(PROMPT, past_key_values=(cache := dilated_cache()))
        register(PATTERNS["sinks"])
        with pytest.raises(ValueError, match=r"the cache was filled under Pattern\(\[4, 16\], \[1, 2\]\), and the pattern of"):
            model(PROMPT[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match=r"cu_seq_lens_q with a dilated_cache\(\)"):
            model(PROMPT, past_key_values=dilated_cache(), cu_seq_lens_q=torch.tensor([0, 5, 22], dtype=torch.int32))
    with pytest.raises(ValueError, match="another attn_implementation than dilkit's"):
        sdpa.generate(PROMPT, **OPTIONS, past_key_values=dilated_cache())
    with pytest.raises(ValueError, match=r"decode under torch\.no_grad"):
        model(PROMPT, past_key_values=dilated_cache())
    with pytest.raises(ValueError, match="rollback=-1 must be at least 0"):
        dilated_cache(-1)


def test_copies_choices_and_a_new_beginning():
    register(PATTERN)
    model, cache, full = llama(attn_implementation="dilkit"), dilated_cache(), package.DynamicCache()
    for kept in (cache, full):
        with torch.no_grad():
            model(PROMPT, past_key_values=kept)
        kept.batch_repeat_interleave(2)
        kept.batch_select_indices(torch.tensor([0, 3, 2]))
    with torch.no_grad():
        found, wanted = (model(PROMPT[[0, 1, 1], :1], past_key_values=kept).logits for kept in (cache, full))
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        with pytest.raises(ValueError, match="tokens_to_remove=3 must be at most 0"):
            cache.crop(3)
        with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
            cache.batch_repeat_interleave(0)
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(PROMPT, past_key_values=cache).logits, model(PROMPT).logits, atol=2e-5, rtol=2e-5)


def test_keys_that_several_attention_calls_share():
    register(PATTERN)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, pad_token_id=0)
    model = package.DiffLlamaForCausalLM(package.DiffLlamaConfig(**sizes, attn_implementation="dilkit")).eval()
    with torch.no_grad(), pytest.raises(ValueError, match="several attention calls of the model share the keys of one layer"):
        model(PROMPT, past_key_values=dilated_cache())
