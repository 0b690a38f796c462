"""`convert` says by layer what changed, and leaves what it refuses as it was; a converted model is loaded as it was saved."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, SIZES, bert, llama, result, sequences, transformers
from torch.testing import assert_close

from dilkit import Pattern

package = transformers()
from dilkit.integrations.transformers import convert, load, register  # noqa: E402

TOKENS = sequences((40,))[0][None]


def test_a_converted_model_computes_the_pattern_with_its_own_weights() -> None:
    register(PATTERN, "dilkit_by_argument")
    wanted, model = llama(attn_implementation="dilkit_by_argument"), llama()
    report = convert(model, PATTERN)
    assert str(report).splitlines() == [
        "2 attention layers",
        "model.layers.0.self_attn (LlamaAttention): sdpa -> Pattern([4, 16], [1, 2])",
        "model.layers.1.self_attn (LlamaAttention): sdpa -> Pattern([4, 16], [1, 2])",
    ]
    with torch.no_grad():
        assert_close(result(model, input_ids=TOKENS), result(wanted, input_ids=TOKENS))


def test_patterns_by_layer_and_a_second_conversion() -> None:
    model = bert()
    with torch.no_grad():
        dense = result(model, input_ids=TOKENS)
        report = convert(model, [PATTERN, Pattern.dense()])
        assert [(layer.path, layer.pattern) for layer in report.layers] == [
            ("encoder.layer.0.attention.self", PATTERN),
            ("encoder.layer.1.attention.self", Pattern.dense()),
        ]
        assert (result(model, input_ids=TOKENS) - dense).abs().amax() > 1e-3
        assert {layer.before for layer in convert(model, Pattern.dense()).layers} == {"dilkit"}
        assert_close(result(model, input_ids=TOKENS), dense, atol=2e-5, rtol=2e-5)


def of_two_kinds() -> Any:
    """A model of layers of two kinds, of which the second has no number, as Zamba's that several layers share."""
    model = llama(layer_types=["full_attention"] * 2)
    model.model.layers[1].self_attn.layer_idx = None
    return model


def chunked() -> Any:
    model = llama()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    return model


def bart() -> Any:
    return package.BartModel(package.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=64))


@pytest.mark.parametrize(
    ("make", "pattern", "error", "words"),
    [
        (llama, [PATTERN], ValueError, "pattern is a list of 1, and the model has 2 attention layers"),
        (llama, None, ValueError, "there is no pattern: the configuration"),
        (llama, "dense", TypeError, r"a dilkit\.Pattern is needed"),
        (partial(torch.nn.Linear, 3, 3), PATTERN, TypeError, "model is a Linear; a model of transformers is needed"),
        (chunked, PATTERN, ValueError, r"model\.layers\.1\.self_attn has chunked_attention, which dilated attention does not"),
        (of_two_kinds, PATTERN, ValueError, r"LlamaAttention has no number \(layer_idx\) by which layer_types"),
        (bart, PATTERN, ValueError, "BartConfig has cross-attention"),
    ],
)
def test_what_does_not_fit_stays_as_it_was(make: Any, pattern: Any, error: type[Exception], words: str) -> None:
    model = make()
    with pytest.raises(error, match=words):
        convert(model, pattern)
    config = getattr(model, "config", None)
    assert (getattr(config, "_attn_implementation", "sdpa"), hasattr(config, "dilkit")) == ("sdpa", False)


def llava(text: str = "llama", **options: Any) -> Any:
    """A model of two layers, after one for images whose attention has no number."""
    tower = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    parts = dict(vision_config=tower | PATCHES, text_config=dict(SIZES, model_type=text, num_key_value_heads=2, **options))
    torch.manual_seed(1)
    made = package.LlavaConfig(**parts, image_token_id=63, vision_feature_layer=-1)
    return package.LlavaForConditionalGeneration(made).eval()


PATCHES = dict(image_size=16, patch_size=4)
IMAGES = dict(pixel_values=torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1)))
BESIDE_TOKENS = dict(IMAGES, input_ids=torch.cat([torch.full((1, 16), 63), TOKENS.clamp(max=62)], dim=1))


def test_the_layers_for_images_are_listed_and_have_the_pattern() -> None:
    register(PATTERN)
    model = llava()
    with torch.no_grad():
        wanted = result(model, **BESIDE_TOKENS)
        report = convert(model, Pattern.dense())
        assert [layer.kind for layer in report.layers] == ["CLIPAttention", "LlamaAttention", "LlamaAttention"]
        assert_close(result(model, **BESIDE_TOKENS), wanted, atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match=r"pattern is a list, and .*\(CLIPAttention\) has no number"):
        convert(model, [PATTERN] * 2)


def test_beside_windows_the_layers_for_images_stay_as_they_are() -> None:
    model = llava("mistral", sliding_window=6)
    with torch.no_grad():
        wanted = result(model, **BESIDE_TOKENS)
        assert [layer.kind for layer in convert(model, name="dilkit_own").layers] == ["MistralAttention"] * 2
        assert_close(result(model, **BESIDE_TOKENS), wanted, atol=2e-5, rtol=2e-5)
    names = [part._attn_implementation for part in (model.config.text_config, model.config.vision_config)]
    assert names == ["dilkit_own", "sdpa"]


def test_a_part_of_a_model() -> None:
    model = llava()
    report = convert(model.model.language_model, [PATTERN, Pattern.dense()])
    assert [layer.pattern for layer in report.layers] == [PATTERN, Pattern.dense()]
    assert model.config.vision_config._attn_implementation == "sdpa"


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
    assert load(tmp_path, attn_implementation="dilkit_loaded").config._attn_implementation == "dilkit_loaded"
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
