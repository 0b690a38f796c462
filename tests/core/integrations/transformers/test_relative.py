"""Layers with query-dependent relative positions: by dilkit they compute what they computed before, with all gradients."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.language_models import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from dilkit import Pattern, SlidingWindow

package = transformers()
from dilkit.integrations.transformers import convert_relative  # noqa: E402
from dilkit.integrations.transformers.relative import ignored_keys  # noqa: E402

SIZES = dict(hidden_size=16, conv_depthwise_kernel_size=3)
SPEECH = dict(SIZES, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2, layerdrop=0.0)
SHAW = dict(left_max_position_embeddings=4, right_max_position_embeddings=2)
SEAMLESS = dict(
    SIZES,
    speech_encoder_attention_heads=2,
    speech_encoder_layers=2,
    speech_encoder_intermediate_size=24,
    feature_projection_input_dim=8,
    speech_encoder_layerdrop=0.0,
    adaptor_kernel_size=2,
    adaptor_stride=2,
)
CONFORMER = dict(conv_dim=(8,), conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1)
CONFORMER |= dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
PARAKEET = dict(hidden_size=16, num_key_value_heads=2, num_mel_bins=16, subsampling_conv_channels=8, conv_kernel_size=3)
SAM = dict(hidden_size=16, output_channels=8, num_hidden_layers=3, num_attention_heads=2, image_size=40, patch_size=8)


def speech(name: str, model: str, **options):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(module, model)(getattr(module, options.pop("config"))(**options))


def sam(implementation: str):
    config = package.SamVisionConfig(**SAM, window_size=3, global_attn_indexes=[1], mlp_dim=16)
    config._attn_implementation = implementation
    return package.SamVisionModel(config)


def bert(kind: str):
    options = dict(SPEECH, **SHAW, feature_projection_input_dim=8, position_embeddings_type=kind)
    return speech("wav2vec2_bert", "Wav2Vec2BertModel", config="Wav2Vec2BertConfig", **options)


def seamless(version: str):
    name, camel = "seamless_m4t" + (f"_{version}" if version else ""), f"SeamlessM4T{version}"
    own = dict(speech_encoder_chunk_size=9) if version else {}
    return speech(name, f"{camel}SpeechEncoder", config=f"{camel}Config", **SEAMLESS, **own)


def conformer():
    options = dict(SPEECH, **CONFORMER, position_embeddings_type="relative")
    return speech("wav2vec2_conformer", "Wav2Vec2ConformerModel", config="Wav2Vec2ConformerConfig", **options)


def parakeet():
    return speech("parakeet", "ParakeetEncoder", config="ParakeetEncoderConfig", **SPEECH | PARAKEET)


MODELS = {
    "parakeet": (parakeet, (2, 96, 16), True),
    "wav2vec2-bert shaw": (lambda: bert("relative_key"), (2, 13, 8), True),
    "wav2vec2-bert": (lambda: bert("relative"), (2, 13, 8), True),
    "wav2vec2-conformer": (conformer, (2, 80), False),
    "seamless": (lambda: seamless(""), (2, 12, 8), True),
    "seamless v2": (lambda: seamless("v2"), (2, 9, 8), True),
    "sam sdpa": (lambda: sam("sdpa"), (2, 3, 40, 40), False),
    "sam eager": (lambda: sam("eager"), (2, 3, 40, 40), False),
}
"""Models: a function that makes one, the shape of its input, True if a part of that is padding."""


def made(make: Callable[[], Any]):
    torch.manual_seed(3)
    model = make().double().eval()
    for x in model.parameters():  # of which some begin as zeros
        nn.init.normal_(x, std=0.2)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_the_model(name):
    make, shape, padded = MODELS[name]
    model = made(make)
    converted = copy.deepcopy(model)
    changed = convert_relative(converted)
    assert len(changed.layers) == 2 + name.startswith("sam")
    assert changed.kept == (("adapter.layers.0.self_attn",) if name.startswith("seamless") else ())
    inputs, found = torch.randn(shape, dtype=torch.float64), []
    mask = torch.arange(shape[1]) < torch.tensor([[shape[1] * 5 // 8], [shape[1]]])
    for one in (model, converted, copy.deepcopy(converted)):
        returned = one(inputs, attention_mask=mask.long()) if padded else one(inputs)
        out, seen = returned.last_hidden_state, mask
        if name == "parakeet":
            seen = returned.attention_mask.bool()
        elif name.startswith("seamless"):  # of the other sequence fewer rows are left
            seen = torch.tensor([False, True])
        out = out[seen] if padded else out
        leaves = [x for x in one.parameters() if x.requires_grad]
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)])
    close = dict(atol=1e-5, rtol=1e-5) if "eager" in name else {}  # which computes a softmax in float32
    assert_close(found[1], found[0], **close)
    assert_close(found[2], found[1])


@pytest.mark.parametrize("name", ["parakeet", "wav2vec2-bert shaw", "wav2vec2-bert"])
def test_windows_need_the_distances_within_them_alone(name):
    """A window is what the layer computes with a mask of it, in as many columns as it reaches."""
    model = made(MODELS[name][0])
    path, layer = next((path, x) for path, x in model.named_modules() if path.endswith("self_attn"))
    own = copy.deepcopy(layer)
    convert_relative(model, Pattern.of(SlidingWindow(before=3, after=1)))
    seq, x = 11, torch.randn(2, 11, 16, dtype=torch.float64)
    apart = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = ((apart <= 3) & (apart >= -1)).expand(2, 1, seq, seq)
    given = {} if "shaw" in name else dict(relative_position_embeddings=torch.randn(1, 2 * seq - 1, 16, dtype=torch.float64))
    if name == "parakeet":
        given = dict(position_embeddings=given["relative_position_embeddings"].expand(2, -1, -1))
    hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    layer = model.get_submodule(path)
    assert layer._columns(seq) == 3
    assert_close(layer(x, **given)[0], own(x, attention_mask=seen if name == "parakeet" else hidden, **given)[0])
    with pytest.raises(ValueError, match="hides other keys than padding"):
        layer(x, attention_mask=hidden, **given)
    with pytest.raises(ValueError, match=r"output_attentions of \w+ is not known"):
        layer(x, output_attentions=True, **given)


def test_masks_are_padding_in_each_form():
    ignored = torch.tensor([[False, False, True], [False, True, False]])
    seen = ~ignored[:, None, None].expand(2, 1, 3, 3)
    added = torch.zeros(2, 1, 3, 3).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in ((~ignored).long(), seen, added, seen & seen.transpose(2, 3), added[:, :, :1]):
        assert torch.equal(ignored_keys(mask, 2), ignored)
    assert not ignored_keys(torch.ones(1, 1, 3, 3, dtype=torch.bool), 2).any()
    for mask in (added + 0.5, torch.ones(3, 3, dtype=torch.bool).tril()[None, None]):
        with pytest.raises(ValueError, match="hides other keys than padding"):
            ignored_keys(mask, 2)
    for mask in (torch.zeros(2, 3, 3), seen.long()):
        with pytest.raises(ValueError, match=r"attention_mask is torch\.\w+ \(2, "):
            ignored_keys(mask, 2)


def test_a_model_without_such_layers_or_with_others_is_refused(monkeypatch):
    config = package.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    with pytest.raises(ValueError, match="relative positions; its attention is BertAttention, BertSelfAttention"):
        convert_relative(package.BertModel(config))
    with pytest.raises(TypeError, match="model is a int"):
        convert_relative(3)
    model = made(MODELS["wav2vec2-bert"][0])
    with pytest.raises(ValueError, match="pattern is a list of 3, and the model has 2"):
        convert_relative(model, [Pattern.dense()] * 3)
    layer = model.encoder.layers[0].self_attn
    own = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x, **options: (1.01 * own(self, x, **options)[0], None))
    with pytest.raises(ValueError, match="Wav2Vec2BertSelfAttention of this version differs from dilkit by"):
        convert_relative(model)
    assert type(layer).__module__.startswith("transformers.")


def test_a_second_pattern_takes_the_place_of_the_first():
    model, x = made(MODELS["wav2vec2-bert"][0]), torch.randn(1, 11, 8, dtype=torch.float64)
    right: Tensor = model(x).last_hidden_state
    convert_relative(model, Pattern.mistral(2))
    assert not torch.allclose(model(x).last_hidden_state, right)
    again = convert_relative(model)
    assert {layer.before for layer in again.layers} == {"dilkit"}
    assert_close(model(x).last_hidden_state, right)
