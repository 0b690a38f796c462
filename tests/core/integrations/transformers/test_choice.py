"""A model that would not ask dilkit is refused when it is made; one that was converted stays converted when it is loaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, SIZES, llama, result, sequences, transformers
from torch.testing import assert_close

from dilkit import Pattern

package = transformers()
from dilkit.integrations.transformers import convert, load, register  # noqa: E402

TOKENS = sequences((30,))[0][None]
NEVER_ASK = ("XGLM", "GPTNeoXJapanese", "RoFormer", "TrOCR", "Falcon")


@pytest.mark.parametrize("family", NEVER_ASK)
def test_models_that_do_not_look_their_attention_up(family: str) -> None:
    register(PATTERN)
    config = getattr(package, f"{family}Config")(attn_implementation="dilkit", **SIZES, is_decoder=True)
    with pytest.raises(ValueError, match=rf"attn_implementation='dilkit': {family}\w* does not look its attention up by name"):
        getattr(package, f"{family}ForCausalLM")(config)


def test_a_class_without_source_is_taken_at_its_word() -> None:
    """One of a notebook, say; `_can_set_attn_implementation` is False of it."""
    unknown = {"__module__": "no_such_module", "_can_set_attn_implementation_cached_value": None}
    kind = type("Mine", (package.LlamaForCausalLM,), unknown)
    register(PATTERN)
    kind(package.LlamaConfig(**SIZES, attn_implementation="dilkit"))
    assert not kind._can_set_attn_implementation()


def test_one_that_uses_its_mask_by_itself_computes_nothing() -> None:
    """Also where a version of transformers does not ask for what the check at the beginning goes by."""
    register(Pattern.dense())
    model = package.GPTNeoXJapaneseForCausalLM(package.GPTNeoXJapaneseConfig(**SIZES)).eval()
    model.config._attn_implementation = "dilkit"
    with pytest.raises(ValueError, match="add of a TokenMask: the model computes with its attention mask by itself"):
        model(TOKENS)


def test_the_mask_decides_what_is_causal() -> None:
    """The attention layers of BigBird-Pegasus are not causal by their own word, those of Llama are."""
    register(Pattern.dense())
    sizes = dict(d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, vocab_size=64)
    pegasus = package.BigBirdPegasusForCausalLM(package.BigBirdPegasusConfig(**sizes, attn_implementation="dilkit")).eval()
    changed = TOKENS.clone()
    changed[:, -1] = 7
    with torch.no_grad():
        assert_close(result(pegasus, input_ids=changed)[:, :-1], result(pegasus, input_ids=TOKENS)[:, :-1], atol=0, rtol=0)
        both = [llama(attn_implementation=kind, is_causal=False) for kind in ("dilkit", "eager")]
        ours, eager = (result(model, input_ids=TOKENS) for model in both)
        assert_close(ours, eager, atol=2e-5, rtol=2e-5)


def test_a_converted_model_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    model = llama()
    convert(model, PATTERN)
    with torch.no_grad():
        wanted = result(model, input_ids=TOKENS)
        for folder in ("first", "second"):
            model.save_pretrained(tmp_path / folder)
            model = package.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            assert_close(result(model, input_ids=TOKENS), wanted)


def test_a_pattern_without_an_attention_is_said(tmp_path: Path) -> None:
    """Configurations of earlier versions say the pattern alone."""
    register()
    llama().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(dilkit=json.loads(PATTERN.to_json()))))
    assert load(tmp_path).config._attn_implementation == "dilkit"
    with pytest.warns(UserWarning, match=r"the configuration of this \w+ has a pattern.*Give attn_implementation='dilkit'"):
        package.AutoModelForCausalLM.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dilkit")
        package.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")  # asked for


def test_converting_one_model_leaves_others_as_they_are() -> None:
    register(PATTERN)
    first, second = llama(attn_implementation="dilkit"), llama()
    with torch.no_grad():
        before = result(first, input_ids=TOKENS)
        convert(second, Pattern.dense())
        assert_close(result(first, input_ids=TOKENS), before, atol=0, rtol=0)
        assert_close(result(second, input_ids=TOKENS), result(llama(), input_ids=TOKENS), atol=2e-5, rtol=2e-5)


def test_a_model_with_windows_is_not_converted_to_the_pattern_of_others() -> None:
    register(PATTERN)
    mistral: Any = package.MistralForCausalLM(package.MistralConfig(**SIZES, sliding_window=6, num_key_value_heads=2))
    with pytest.raises(ValueError, match="name='dilkit' is registered with"):
        convert(mistral)
    assert len(convert(mistral, name="dilkit_by_window").layers) == 2


@pytest.mark.parametrize("name", ["dilkit", "dilkit_saved"])
def test_load_takes_the_attention_that_a_model_was_saved_with(tmp_path: Path, name: str) -> None:
    model = llama()
    convert(model, PATTERN, name)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float64)
    assert (again.config._attn_implementation, again.dtype) == (name, torch.float64)
    assert_close(again.eval()(TOKENS).logits, model(TOKENS).logits.double(), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no pattern, config\.dilkit; load the model by from_pretrained"):
        load(tmp_path)
    file = tmp_path / "config.json"
    changed = dict(dilkit=json.loads(PATTERN.to_json()), architectures=["NoSuchModel"])
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ValueError, match=r"is of \['NoSuchModel'\], which transformers .* does not have"):
        load(tmp_path)
