"""`convert` changes a model that is there, says by layer what changed, and leaves what it refuses as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, SIZES, bert, llama, result, sequences, transformers
from torch.testing import assert_close

from dilkit import Pattern

package = transformers()
from dilkit.integrations.transformers import convert, register  # noqa: E402

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
