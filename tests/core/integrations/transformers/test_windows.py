"""Models with sliding windows, in all layers or in some: what `eager` attention of transformers computes, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, SIZES, WINDOW, WINDOWED, result, sequences, transformers
from torch.testing import assert_close

from dilkit import GlobalTokens, Pattern, SlidingWindow
from dilkit.comm import run_threads

package = transformers()
from dilkit.integrations.transformers import context_parallel, convert, register  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=2e-5)
STEPS = 12
QUICK = ("mistral", "gemma3")
"""With windows in all layers, and in every other one."""
TOKENS = sequences((30,))[0][None]


@pytest.fixture(autouse=True)
def registered() -> None:
    register(None)


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    ours, eager = (WINDOWED[name](attn_implementation=kind, **options) for kind in ("dilkit", "eager"))
    return ours, eager


@pytest.mark.parametrize("name", QUICK)
def test_padding_that_a_window_would_count_is_refused(name: str) -> None:
    ours, eager = pair(name)
    mask = torch.ones_like(TOKENS)
    mask[:, 3:5] = 0
    short = dict(input_ids=TOKENS[:, :WINDOW], attention_mask=mask[:, :WINDOW])
    with torch.no_grad():
        assert_close(*(result(model, **short)[:, [0, 1, 2, 5]] for model in (ours, eager)), **CLOSE)
        with pytest.raises(ValueError, match=rf"padding between tokens, but its window of {WINDOW} \(sliding_window\) counts"):
            result(ours, input_ids=TOKENS, attention_mask=mask)
        (ranks,) = run_threads(1, partial(context_parallel, ours))
        with pytest.raises(ValueError, match=f"padding between tokens, but sliding_window={WINDOW} of the model counts"):
            ranks.shard(dict(input_ids=TOKENS, attention_mask=mask))
        assert ranks.shard(short)["input_ids"].shape == (1, WINDOW - 2)
        ours = pair(name)[0]
        tokens = mask.bool()[0]
        convert(ours, Pattern.mistral(WINDOW))  # counts tokens
        found = result(ours, input_ids=TOKENS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        assert_close(found[:, tokens], result(ours, input_ids=TOKENS[:, tokens]), **CLOSE)


def test_a_pattern_that_is_given_wins() -> None:
    """And the cache of a window is enough for windows that are no longer."""
    register(Pattern.of(SlidingWindow(3)))
    options = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    ours, _ = pair("mistral")
    _, narrow = pair("mistral", sliding_window=3)
    assert torch.equal(ours.generate(TOKENS, **options), narrow.generate(TOKENS, **options))


@pytest.mark.parametrize(
    "pattern", [PATTERN, Pattern.mistral(WINDOW + 1), Pattern.of(SlidingWindow(2), GlobalTokens(1))], ids=str
)
def test_a_pattern_that_sees_what_a_cache_has_left_out_is_refused(pattern: Pattern) -> None:
    register(pattern)
    ours, _ = pair("mistral")
    options = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    words = r"the cache keeps the last 5 tokens .* \(past_key_values=DynamicCache\(\)\), or windows of up to 6"
    with pytest.raises(ValueError, match=words):
        ours.generate(TOKENS, **options)
    options |= dict(past_key_values=package.DynamicCache(), return_dict_in_generate=True, output_logits=True)
    made = ours.generate(TOKENS, **options)
    with torch.no_grad():
        whole = result(ours, input_ids=made.sequences)
    assert_close(torch.stack(made.logits, 1), whole[:, TOKENS.shape[1] - 1 : -1], **CLOSE)


@pytest.mark.parametrize("name", WINDOWED)
def test_convert_without_a_pattern_computes_what_the_model_did(name: str) -> None:
    model = WINDOWED[name](attn_implementation="eager")
    with torch.no_grad():
        wanted = result(model, input_ids=TOKENS)
        report = convert(model)
        assert_close(result(model, input_ids=TOKENS), wanted, **CLOSE)
    second = Pattern.mistral(WINDOW) if name == "mistral" else Pattern.dense()
    assert [layer.pattern for layer in report.layers] == [Pattern.mistral(WINDOW), second]
    assert getattr(model.config, "dilkit", None) is None


NEED_A_PATTERN = {
    "on both sides": (
        *("ModernBert", "Model", dict(local_attention=8, global_attn_every_n_layers=2)),
        *([Pattern.dense(), Pattern.of(SlidingWindow(5))], r"Pattern\.of\(SlidingWindow\(5\)\) for \|i - j\| <= 4"),
    ),
    "not computed": (
        *("Llama", "ForCausalLM", dict(sliding_window=4, num_key_value_heads=2)),
        *(Pattern.dense(), r"sliding_window=4 is in the configuration, but LlamaAttention passes none on"),
    ),
}
"""A Llama takes any number into its configuration, and computes full attention all the same."""


@pytest.mark.parametrize("case", NEED_A_PATTERN)
def test_windows_that_need_a_pattern(case: str) -> None:
    family, kind, sizes, pattern, words = NEED_A_PATTERN[case]
    numbers = dict.fromkeys(["bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 1)
    config, made = getattr(package, f"{family}Config"), getattr(package, f"{family}{kind}")
    ours, eager = (made(config(**SIZES | numbers | sizes, attn_implementation=name)).eval() for name in ("dilkit", "eager"))
    eager.load_state_dict(ours.state_dict())
    with torch.no_grad():
        with pytest.raises(ValueError, match=words):
            result(ours, input_ids=TOKENS)
        register(pattern)
        assert_close(result(ours, input_ids=TOKENS), result(eager, input_ids=TOKENS), **CLOSE)


def test_windows_that_the_configuration_does_not_say_are_refused() -> None:
    ours, _ = pair("qwen2")
    ours.model.layers[1].self_attn.sliding_window = 4
    with pytest.raises(ValueError, match="sliding_window=4 of Qwen2Attention, but by the configuration it is None in layer 1"):
        result(ours, input_ids=TOKENS)
