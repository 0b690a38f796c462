"""`convert` lists the layers it changed, or leaves a model as it was; classes of newer transformers prove themselves first."""

import io
import json
import warnings
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.language_models import PATTERN, SIZES, bert, llama, padded, result, sequences, transformers
from torch.testing import assert_close

from dilkit import Pattern, use_backend
from dilkit.comm import run_threads
from dilkit.integrations import newer
from dilkit.selection import proof

package = transformers()
from dilkit.integrations.transformers import context_parallel, convert, explain, load, register  # noqa: E402
from dilkit.integrations.transformers.across import _watched  # noqa: E402
from dilkit.integrations.transformers.attention import attend  # noqa: E402
from dilkit.integrations.transformers.biases import alibi  # noqa: E402
from dilkit.integrations.transformers.proof import proving, trials  # noqa: E402
from dilkit.integrations.transformers.sequences import TokenMask  # noqa: E402

TOKENS = sequences((40,))[0][None]


def test_a_converted_model_computes_the_pattern_with_its_own_weights():
    register(PATTERN, "dilkit_by_argument")
    other, model = llama(attn_implementation="dilkit_by_argument"), llama()
    with torch.no_grad():
        wanted, dense = (result(one, input_ids=TOKENS) for one in (other, model))
    report = convert(model, PATTERN)
    assert str(report).splitlines() == [
        "2 attention layers",
        "model.layers.0.self_attn (LlamaAttention): sdpa -> Pattern([4, 16], [1, 2])",
        "model.layers.1.self_attn (LlamaAttention): sdpa -> Pattern([4, 16], [1, 2])",
    ]
    with torch.no_grad():
        assert_close(result(model, input_ids=TOKENS), wanted)
        convert(model, ["dense()", "Pattern.dense()"])
        assert_close(result(model, input_ids=TOKENS), dense, atol=2e-5, rtol=2e-5)
        assert_close(result(other, input_ids=TOKENS), wanted, atol=0, rtol=0)


def test_patterns_by_layer_and_a_second_conversion():
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


def of_two_kinds():
    model = llama(layer_types=["full_attention"] * 2)
    model.model.layers[1].self_attn.layer_idx = None
    return model


def of_another_kind(*kinds: str):
    model = llama()
    model.config.layer_types = [*kinds, "indexed_attention"]
    return model


def test_layers_of_another_kind_keep_their_own_attention(tmp_path):
    model, wanted = of_another_kind("full_attention"), llama()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 7, 8)
    with pytest.raises(ValueError, match="is for 5 and 5: layer 1 has indexed_attention; convert"):  # keys of its own beside
        attend(None, None, model.model.layers[1].self_attn, q, k, k, TokenMask(True, 5, 5))
    report = convert(model, PATTERN)
    convert(wanted, [PATTERN, Pattern.dense()])
    assert ([layer.path for layer in report.layers], report.kept) == (["model.layers.0.self_attn"], ("model.layers.1.self_attn",))
    batch = padded(sequences(), "left")
    for _ in range(2):
        found, other = result(deepcopy(model), **batch), result(wanted, **batch)
        assert_close(found[batch["attention_mask"].bool()], other[batch["attention_mask"].bool()], atol=2e-5, rtol=2e-5)
        assert model.model.layers[1].self_attn.config._attn_implementation == "sdpa"
        assert model.config.dilkit[1] is None
        assert convert(model, PATTERN).kept == report.kept
    with pytest.raises(ValueError, match="continuous batching keeps its own attention"):
        result(model, **batch, read_index=[])
    model.config.layer_types = None  # as of a model with parts, whose layer_types are those of a part
    with pytest.raises(ValueError, match="keeps its own attention, as convert says, and would see the rows of one rank"):
        run_threads(1, lambda comm: context_parallel(model, comm))
    model.config.layer_types = ["full_attention", "indexed_attention"]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no pattern for layer 1, LlamaAttention, which kept its own"):
        attend(None, None, load(tmp_path).model.layers[1].self_attn, q, k, k, TokenMask(True, 5, 5))
    again = load(tmp_path)
    assert convert(again).kept == report.kept
    tokens = batch["attention_mask"].bool()
    assert_close(result(again, **batch)[tokens], result(wanted, **batch)[tokens], atol=2e-5, rtol=2e-5)


def git(attention: str):
    torch.manual_seed(1)
    sizes = dict(SIZES, vision_config=dict(SIZES, image_size=16, patch_size=4), bos_token_id=1, eos_token_id=2)
    return package.GitModel(package.GitConfig(**sizes, attn_implementation=attention)).eval()


def test_layers_whose_class_is_chosen_by_the_attention_keep_it():
    register(PATTERN)
    with pytest.raises(ValueError, match=r"attn_implementation='dilkit' of GitConfig.*with eager, of GIT_SELF_ATTENTION_CLASSES"):
        git("dilkit")
    model, batch = git("eager"), padded(sequences(), "left")
    with torch.no_grad():
        wanted = result(model, **batch)
        for pattern in (Pattern.dense(), PATTERN):
            report = convert(model, pattern)
            assert_close(result(model, **batch), wanted)
            assert ("encoder.layer.0.attention.self" in report.kept, report.layers[0].kind) == (True, "GitVisionAttention")
        reasons = explain(model, **batch).others
        assert reasons["encoder.layer.0.attention.self"] == "keeps the attention 'eager': its class computes it"


def test_explain_has_the_choice_of_each_layer_or_a_reason():
    model = of_another_kind("full_attention")
    convert(model, PATTERN)
    with use_backend("reference"):
        trace = explain(model, input_ids=TOKENS)
        (call,) = trace.layers.pop("model.layers.0.self_attn")
        assert (call.picked, call.problem.pattern, call.problem.requires_grad) == ("reference", PATTERN, True)
    reason = trace.others.pop("model.layers.1.self_attn")
    assert reason.startswith("keeps the attention 'sdpa': dilated attention takes the place of")
    assert reason.endswith(", not of indexed_attention")
    assert trace.layers == trace.others == {}
    assert not any(module._forward_hooks for module in model.modules())
    register(Pattern.dense(), "dilkit_alibi")
    bloom = package.BloomModel(package.BloomConfig(hidden_size=32, n_layer=1, n_head=4, attn_implementation="dilkit_alibi"))
    assert str(explain(bloom, input_ids=TOKENS)).startswith("h.0.self_attention: ")
    assert explain(llama(), input_ids=TOKENS).others["model.layers.0.self_attn"] == "has the attention 'sdpa'"


@pytest.mark.parametrize(
    ("make", "pattern", "error", "words"),
    [
        (llama, [PATTERN], ValueError, "pattern is a list of 1, and the model has 2 attention layers"),
        (llama, "dense", ValueError, "'dense' is no number"),
        (partial(torch.nn.Linear, 3, 3), PATTERN, TypeError, "model is a Linear; a model of transformers is needed"),
        (
            partial(of_another_kind, "conv"),
            PATTERN,
            ValueError,
            r"layers\.0\.self_attn has conv, and no layer has sliding_attention",
        ),
        (of_two_kinds, PATTERN, ValueError, r"LlamaAttention has no number \(layer_idx\) by which layer_types"),
    ],
)
def test_what_does_not_fit_stays_as_it_was(make, pattern, error, words):
    model = make()
    with pytest.raises(error, match=words):
        convert(model, pattern)
    config = getattr(model, "config", None)
    assert (getattr(config, "_attn_implementation", "sdpa"), hasattr(config, "dilkit")) == ("sdpa", False)


def bart(**options):
    torch.manual_seed(1)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4)
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=64, pad_token_id=0, init_std=0.3)
    return package.BartModel(package.BartConfig(**sizes, **heads, **options)).eval()


def mllama(**options):
    layers = dict(cross_attention_layers=[1], rope_parameters=dict(rope_type="default", rope_theta=1e4))
    torch.manual_seed(1)
    config = package.models.mllama.MllamaTextConfig(**dict(SIZES, num_key_value_heads=2, **layers, **options))
    return package.models.mllama.modeling_mllama.MllamaForCausalLM(config).eval()


def counted(module, q, k, v, mask, scaling: float, **options):
    """Attend by the pattern, but for `module.across` to all."""
    scores = q @ k.transpose(2, 3) * scaling
    if not module.across:
        scores = scores + PATTERN.count(q.shape[2], heads=q.shape[1], is_causal=module.is_causal).log()
    return (scores.softmax(-1) @ v).transpose(1, 2), None


@pytest.mark.parametrize("length", [40, 16])
def test_cross_attention_sees_all_whatever_the_pattern(length):
    """Also where both sequences have the same length, by which it could be taken for self-attention."""
    package.AttentionInterface.register("counted", counted)
    ours, wanted = bart(), bart(attn_implementation="counted")
    for path, layer in wanted.named_modules():
        layer.across = path.endswith("encoder_attn")
    report = convert(ours, PATTERN)
    assert [layer.pattern for layer in report.layers] == [PATTERN, PATTERN, Pattern.dense()]
    inputs = dict(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :length])
    outs = [result(model, **inputs, use_cache=False) for model in (ours, wanted)]
    assert_close(*outs, atol=2e-5, rtol=2e-5)
    for out in outs:
        out.square().sum().backward()
    for ours_grad, theirs in zip(ours.parameters(), wanted.parameters(), strict=True):
        assert_close(ours_grad.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_cross_attention_with_padding_a_cache_and_grouped_heads():
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = mask[1, 30:] = mask[1, 3] = 0
    inputs = dict(input_ids=sequences((40, 40))[0].expand(2, 40), attention_mask=mask)
    with torch.no_grad():
        models = [bart() for _ in range(2)]
        convert(models[0], name="dilkit_own")
        steps = []
        for model in models:
            cache = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
            parts = [dict(decoder_input_ids=TOKENS[:, a:b].expand(2, -1)) for a, b in ((0, 9), (9, 10), (10, 14))]
            steps.append(torch.cat([result(model, **inputs, **part, past_key_values=cache) for part in parts], 1))
        assert_close(*steps, atol=2e-5, rtol=2e-5)
        models, rows = [mllama(attn_implementation="eager") for _ in range(2)], torch.randn(1, 12, 32)
        convert(models[0], PATTERN)
        found = []
        for layer in (model.model.layers[1].cross_attn for model in models):
            cache = package.DynamicCache()
            first = layer(rows[:, :9], cross_attention_states=rows, past_key_values=cache)[0]
            found.append(torch.cat((first, layer(rows[:, 9:], past_key_values=cache)[0]), 1))  # keys of the cache alone
        assert_close(*found, atol=2e-5, rtol=2e-5)


def test_a_layer_that_does_not_say_whose_its_keys_are_is_refused():
    ours = bart()
    convert(ours, PATTERN)
    layer = ours.decoder.layers[0].encoder_attn

    class Unwatched(type(layer)):
        def forward(self, hidden_states, key_value_states=None, **options):
            attention_interface = attend
            q = self.q_proj(hidden_states).unflatten(2, (4, 8)).transpose(1, 2)
            return attention_interface(PATTERN, None, self, q, q, q, None, **options)

    with pytest.raises(ValueError, match="BartAttention is cross-attention, which is computed neither causally nor"):
        layer(torch.randn(1, 5, 32), torch.randn(1, 5, 32), is_causal=True)
    hooked = partial(type(layer).forward.__wrapped__, layer)  # kept before its class was wrapped
    with pytest.raises(ValueError, match="before hooks replace its forward"):
        hooked(torch.randn(1, 5, 32), torch.randn(1, 5, 32))
    patched = _watched(lambda self, *args, **options: None)  # its arguments are not known: not taken for cross-attention
    assert not hasattr(patched, "says_across")
    layer.__class__ = Unwatched
    with pytest.raises(ValueError, match="Unwatched may be cross-attention, of two sequences, and does not say so"):
        layer(torch.randn(1, 5, 32))


def llava(text: str = "llama", **options):
    """A model of two layers, after one for images whose attention has no number."""
    tower = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    tower |= dict(image_size=16, patch_size=4)
    parts = dict(vision_config=tower, text_config=dict(SIZES, model_type=text, num_key_value_heads=2, **options))
    torch.manual_seed(1)
    made = package.LlavaConfig(**parts, image_token_id=63, vision_feature_layer=-1)
    return package.LlavaForConditionalGeneration(made).eval()


IMAGE = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
BESIDE_TOKENS = dict(pixel_values=IMAGE, input_ids=torch.cat([torch.full((1, 16), 63), TOKENS.clamp(max=62)], dim=1))


def test_the_layers_for_images_have_the_pattern():
    register(PATTERN)
    model = llava()
    with torch.no_grad():
        wanted = result(model, **BESIDE_TOKENS)
        report = convert(model, Pattern.dense())
        assert [layer.kind for layer in report.layers] == ["CLIPAttention", "LlamaAttention", "LlamaAttention"]
        assert_close(result(model, **BESIDE_TOKENS), wanted, atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match=r"pattern is a list, and .*\(CLIPAttention\) has no number"):
        convert(model, [PATTERN] * 2)
    model = llava()
    report = convert(model.model.language_model, [PATTERN, Pattern.dense()])
    assert [layer.pattern for layer in report.layers] == [PATTERN, Pattern.dense()]
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_beside_windows_the_layers_for_images_stay_as_they_are():
    model = llava("mistral", sliding_window=6)
    with torch.no_grad():
        wanted = result(model, **BESIDE_TOKENS)
        report = convert(model, name="dilkit_own")
        assert [layer.kind for layer in report.layers] == ["MistralAttention"] * 2
        assert str(report).splitlines()[3:] == [f"{path}: stays as it is" for path in report.kept]
        assert report.kept == ("model.vision_tower.encoder.layers.0.self_attn",)
        assert_close(result(model, **BESIDE_TOKENS), wanted, atol=2e-5, rtol=2e-5)
    names = [part._attn_implementation for part in (model.config.text_config, model.config.vision_config)]
    assert names == ["dilkit_own", "sdpa"]


@pytest.mark.parametrize("family", ["XGLM", "GPTNeoXJapanese", "RoFormer", "TrOCR", "Falcon"])
def test_models_that_do_not_look_their_attention_up(family):
    register(PATTERN)
    config = getattr(package, f"{family}Config")(attn_implementation="dilkit", **SIZES, is_decoder=True)
    with pytest.raises(ValueError, match=rf"attn_implementation='dilkit': {family}\w* does not look its attention up by name"):
        getattr(package, f"{family}ForCausalLM")(config)


def test_a_class_without_source_is_taken_at_its_word():
    unknown = {"__module__": "no_such_module", "_can_set_attn_implementation_cached_value": None}
    kind = type("Mine", (package.LlamaForCausalLM,), unknown)
    register(PATTERN)
    kind(package.LlamaConfig(**SIZES, attn_implementation="dilkit"))
    assert not kind._can_set_attn_implementation()


def test_one_that_uses_its_mask_by_itself_computes_nothing():
    register(Pattern.dense())
    model = package.GPTNeoXJapaneseForCausalLM(package.GPTNeoXJapaneseConfig(**SIZES)).eval()
    model.config._attn_implementation = "dilkit"
    with pytest.raises(ValueError, match="add of a TokenMask: the model computes with its attention mask by itself"):
        model(TOKENS)


def test_the_mask_decides_what_is_causal():
    """The layers of a Llama are causal by their own word, those of a BigBird-Pegasus are not."""
    register(Pattern.dense())
    sizes = dict(d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, vocab_size=64)
    pegasus = package.BigBirdPegasusForCausalLM(package.BigBirdPegasusConfig(**sizes, attn_implementation="dilkit")).eval()
    with torch.no_grad():
        first, whole = (result(pegasus, input_ids=tokens) for tokens in (TOKENS[:, :-1], TOKENS))
        assert_close(whole[:, :-1], first, atol=2e-5, rtol=2e-5)
        both = (result(llama(attn_implementation=kind, is_causal=False), input_ids=TOKENS) for kind in ("dilkit", "eager"))
        assert_close(*both, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["dilkit", "dilkit_saved"])
def test_a_converted_model_is_loaded_as_it_was_saved(tmp_path, name):
    model = llama()
    convert(model, PATTERN, name)
    with torch.no_grad():
        wanted = result(model, input_ids=TOKENS)
        for folder in ("first", "second"):
            model.save_pretrained(tmp_path / folder)
            model = package.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            assert_close(result(model, input_ids=TOKENS), wanted)
        again = load(tmp_path / "first", dtype=torch.float64)
        assert (again.config._attn_implementation, again.dtype) == (name, torch.float64)
        assert_close(result(again.eval(), input_ids=TOKENS), wanted.double(), atol=1e-5, rtol=1e-5)


def test_a_pattern_without_an_attention_is_said(tmp_path):
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


def test_windows_are_not_converted_to_the_pattern_of_others():
    register(PATTERN)
    mistral = package.MistralForCausalLM(package.MistralConfig(**SIZES, sliding_window=6, num_key_value_heads=2))
    with pytest.raises(ValueError, match="name='dilkit' is registered with"):
        convert(mistral)
    assert len(convert(mistral, name="dilkit_by_window").layers) == 2


def test_what_cannot_be_loaded_is_said(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no pattern, config\.dilkit; load the model by from_pretrained"):
        load(tmp_path)
    file = tmp_path / "config.json"
    changed = dict(dilkit=json.loads(PATTERN.to_json()), architectures=["NoSuchModel"])
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ValueError, match=r"is of \['NoSuchModel'\], which transformers .* does not have"):
        load(tmp_path)


LLAMA = "transformers.models.llama.modeling_llama:LlamaForCausalLM"


@pytest.fixture
def asked(monkeypatch, tmp_path: Path) -> list[str]:
    """Record the compared classes, in this process; every version is newer than the tested ones."""
    names: list[str] = []

    def outcome(command):
        names.append(command[-1])
        with redirect_stdout(io.StringIO()) as out:
            try:
                proving.main(command[-1])
            except Exception as error:
                return f"its proof crashed: {error}"
        return out.getvalue().strip()

    monkeypatch.setenv("DILKIT_CUDA_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(newer.NEWEST_TESTED, "transformers", "5.0.0")
    monkeypatch.setattr(proof, "_proofs", {})
    monkeypatch.setattr(proof, "outcome", outcome)
    return names


def test_a_class_that_is_right_is_compared_once_for_all_processes(asked):
    convert(llama(), PATTERN)
    proof._proofs.clear()
    register(PATTERN)
    llama(attn_implementation="dilkit")  # with the model within it, of a class of its own
    kind = type("Mine", (package.LlamaForCausalLM,), {"__module__": "no_such_module"})
    convert(kind(package.LlamaConfig(**SIZES)), PATTERN)
    assert asked == [LLAMA]
    assert {x.verdict for x in proof.recorded()} == {"passed"}


def test_a_class_that_drops_its_cache_is_refused(asked, monkeypatch):
    """MPT dropped a renamed cache: no error, other logits, and sometimes the same tokens."""
    register(PATTERN)
    monkeypatch.setattr(alibi, "_with_cached", lambda layer, key, value, **options: (key, value))
    config = package.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=64, attn_implementation="dilkit")
    words = r":MptForCausalLM of transformers .* generation by cached steps is off by .*5\.0\.0"
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            package.MptForCausalLM(config)
        proof._proofs.clear()
    assert len(asked) == 1


def test_a_class_that_takes_padding_for_tokens_is_refused(asked, monkeypatch):
    monkeypatch.setattr("dilkit.integrations.transformers.masks._tokens", lambda *args: None)
    model = llama()
    with pytest.raises(ValueError, match=r"padding on the left is off by .*DILKIT_GPU_PROOF=off"):
        convert(model, PATTERN)
    assert (model.config._attn_implementation, getattr(model.config, "dilkit", None)) == ("sdpa", None)
    monkeypatch.setenv("DILKIT_GPU_PROOF", "off")
    convert(model, PATTERN)
    assert asked == [LLAMA]


def test_a_class_that_cannot_be_made_small_is_warned_of_once(asked, monkeypatch):
    monkeypatch.setattr(trials, "LARGEST", 10)
    words = r"not all of .*:Llama\w+ could be compared .* it cannot be made small: .* parameters"
    for _ in range(2):
        with pytest.warns(UserWarning, match=words):
            convert(llama(), PATTERN)
        convert(llama(), PATTERN)
        proof._proofs.clear()
    assert asked == [LLAMA, LLAMA.replace("ForCausalLM", "Model")]


def test_a_version_that_is_tested_costs_a_comparison_of_versions(asked, monkeypatch):
    monkeypatch.setitem(newer.NEWEST_TESTED, "transformers", package.__version__)
    monkeypatch.setattr(newer, "full_name", None)
    monkeypatch.setattr("dilkit.environment.gpu_proof", None)
    convert(llama(), PATTERN)
    assert asked == []


@pytest.mark.slow
def test_the_whole_way_in_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("DILKIT_CUDA_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setitem(newer.NEWEST_TESTED, "transformers", "5.0.0")
    convert(llama(), PATTERN)
    assert {x.verdict: x.facts[0] for x in proof.recorded()} == {"passed": LLAMA.replace("ForCausalLM", "Model")}
