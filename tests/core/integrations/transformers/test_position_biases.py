"""Position biases, of ALiBi in Bloom and MPT and by T5's tables: what `eager` attention of transformers computes."""

from functools import partial

import pytest
import torch
from helpers.language_models import PATTERN, padded, result, sequences, transformers
from helpers.pairwise import diagonal
from torch import Tensor
from torch.testing import assert_close

from dilkit import Alibi, t5_buckets
from dilkit.comm import run_threads

package = transformers()
from dilkit.integrations.transformers import context_parallel, convert, dilated_cache, register  # noqa: E402
from dilkit.integrations.transformers.biases.tables import PositionBias, table_of  # noqa: E402
from dilkit.integrations.transformers.sequences import TokenMask  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=2e-5)


@pytest.fixture(autouse=True)
def registered():
    register()
    register(PATTERN, "dilkit_sparse")


def batch(side: str = "left") -> dict[str, Tensor]:
    made = padded(sequences(), side)
    del made["position_ids"]
    return made


HEADS = 3
"""No power of two: some slopes are between those of one."""


def bloom(name: str):
    torch.manual_seed(1)
    sizes = dict(hidden_size=8 * HEADS, n_head=HEADS, n_layer=2, vocab_size=64, hidden_dropout=0.0, attention_dropout=0.5)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
    return package.BloomForCausalLM(package.BloomConfig(**sizes, **ends, attn_implementation=name)).eval()


def mpt(name: str):
    torch.manual_seed(1)
    sizes = dict(d_model=8 * HEADS, n_heads=HEADS, n_layers=2, expansion_ratio=2, max_seq_len=64, vocab_size=64)
    attention = dict(clip_qkv=0.5, softmax_scale=0.7)
    config = package.MptConfig(**sizes, attn_config=attention, initializer_range=0.3, attn_implementation=name)
    model = package.MptForCausalLM(config).eval()
    for block in model.transformer.blocks:
        block.attn.attn_dropout_p = 0.5  # of which its configuration takes whole numbers alone
    return model


MODELS = dict(bloom=bloom, mpt=mpt)
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@pytest.mark.parametrize(("make", "side"), [(bloom, "left"), (bloom, "between"), (mpt, "left"), (mpt, "right"), (mpt, "between")])
def test_a_padded_batch_and_its_gradients(make, side):
    inputs, tokens = batch(side), batch(side)["attention_mask"].bool()
    models = [make(name) for name in ("dilkit", "eager")]
    logits = [model(**inputs).logits[tokens] for model in models]
    assert_close(*logits, **CLOSE)
    for x in logits:
        x.square().mean().backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert_close(ours.grad, theirs.grad, **CLOSE)


@each_model
def test_a_pattern_and_its_last_rows_from_a_cache(make):
    model, tokens = make("dilkit_sparse"), sequences((23,))[0][None]
    with torch.no_grad():
        whole = model(tokens).logits
        cache = model(tokens[:, :9], use_cache=True).past_key_values
        assert_close(model(tokens[:, 9:], past_key_values=cache).logits, whole[:, 9:], **CLOSE)
    assert not torch.allclose(whole, make("dilkit")(tokens).logits, **CLOSE)


@each_model
def test_arguments_of_other_versions_of_transformers(make):
    layer = next(x for x in make("dilkit").modules() if type(x).__name__.endswith("Attention"))
    first, rows = (dict(residual=0, alibi=None) if make is bloom else dict(position_bias=None)), torch.randn(1, 12, 8 * HEADS)

    def attended(start, stop, **options):
        mask = TokenMask(True, stop - start, stop)
        return layer(rows[:, start:stop], **first, attention_mask=mask, use_cache=True, **options)[0]

    with torch.no_grad():
        whole = attended(0, 12)
        for name in ("cache", "layer_past", "past_key_values"):
            cache = package.DynamicCache()
            parts = [attended(start, start + 6, **{name: cache}) for start in (0, 6)]
            assert_close(torch.cat(parts, dim=1), whole, **CLOSE)
    with pytest.raises(TypeError, match=r"\w+Attention.forward got memory, which dilkit does not know"):
        attended(0, 12, memory=rows)


@each_model
def test_what_alibi_refuses(make):
    with pytest.raises(ValueError, match="output_attentions"):
        make("dilkit")(sequences((12,))[0][None], output_attentions=True)


@each_model
def test_blocks_make_checkpoints_of_activations(make):
    """transformers makes them only in the `forward` that it gave the class of the block."""
    tokens, made = sequences((12,))[0][None], []
    for name in ("dilkit", "eager"):
        model = make(name).train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        for block in model.modules():
            if compute := getattr(block, "_gradient_checkpointing_func", None):
                block._gradient_checkpointing_func = lambda *args, x=name, call=compute: made.append(x) or call(*args)
        model(tokens).logits.sum().backward()
    assert made == ["dilkit"] * 2 + ["eager"] * 2


@each_model
def test_models_of_eager_attention_stay_so(make, monkeypatch):
    tokens = sequences((12,))[0][None]
    before = make("eager")(tokens).logits
    make("dilkit")
    monkeypatch.setattr("dilkit.integrations.transformers.biases.alibi._attended", None)
    assert torch.equal(make("eager")(tokens).logits, before)


SIZES = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, dropout_rate=0.0)
BUCKETS = dict(relative_attention_num_buckets=8, relative_attention_max_distance=12)
TEXT = dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
ANSWER = dict(decoder_input_ids=sequences((17,))[0].expand(4, -1))


FAMILIES = dict(
    T5={},
    UMT5={},
    SwitchTransformers=dict(num_experts=2, num_decoder_layers=2, num_sparse_encoder_layers=1),
    LongT5=dict(local_radius=4),
)
each_family = pytest.mark.parametrize("family", FAMILIES)


def t5(name: str, kind: str = "ForConditionalGeneration", family: str = "T5", **options):
    if not package.T5Model._can_set_attn_implementation():
        pytest.skip("this transformers' T5 does not look its attention up by name")
    torch.manual_seed(1)
    config = getattr(package, f"{family}Config")(
        **SIZES, **BUCKETS, **TEXT, **FAMILIES[family], **options, attn_implementation=name
    )
    model = getattr(package, f"{family}{kind}")(config).eval()
    for table in tables(model):
        torch.nn.init.normal_(table)
    return model


def tables(model) -> list[Tensor]:
    return [x for path, x in model.named_parameters() if "relative_attention_bias" in path]


def counted(module, q: Tensor, k: Tensor, v: Tensor, mask: None, position_bias: Tensor, **options):
    scores = q @ k.transpose(2, 3) + position_bias
    if q.shape == k.shape:
        scores = scores + PATTERN.count(q.shape[2], heads=q.shape[1], is_causal=module.is_causal).log()
    return (scores.softmax(-1) @ v).transpose(1, 2), None


@pytest.mark.parametrize(("family", "side"), diagonal(FAMILIES, ["left", "between", "right"]))
def test_a_padded_batch_its_answers_and_its_gradients(family, side):
    models = [t5(name, family=family) for name in ("dilkit", "eager")]
    register()  # the model is converted: it was of eager attention
    models[0].set_attn_implementation("eager")
    convert(models[0], name="dilkit_own")
    logits = [model(**batch(side), **ANSWER).logits for model in models]
    assert_close(*logits, **CLOSE)
    for x in logits:
        x.square().mean().backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_close(ours.grad, theirs.grad, **CLOSE)


@pytest.mark.parametrize("hides", [False, -1e9, -torch.inf])
def test_a_mask_of_keys_in_four_dimensions(hides):
    tokens = batch("right")["attention_mask"].bool()
    mask = tokens if hides is False else torch.zeros(tokens.shape).masked_fill(~tokens, hides)
    model = t5("dilkit", "EncoderModel")
    found = model(batch("right")["input_ids"], attention_mask=mask[:, None, None]).last_hidden_state
    assert_close(found[tokens], model(**batch("right")).last_hidden_state[tokens], **CLOSE)


def test_layers_of_longt5_that_compute_by_themselves():
    """Its local layers take a pattern, and are then those of T5; its transient-global layers stay as they are."""
    model, tokens = t5("eager", "EncoderModel", "LongT5"), dict(input_ids=sequences((23,))[0][None])
    named = {path.replace("LocalSelf", "Self"): x for path, x in model.state_dict().items()}
    (wanted := t5("dilkit_sparse", "EncoderModel")).load_state_dict(named)
    report = convert(model, PATTERN)
    assert {x.kind: x.pattern for x in report.layers} == dict(LongT5LocalAttention=PATTERN)
    assert_close(model(**tokens).last_hidden_state, wanted(**tokens).last_hidden_state, **CLOSE)
    with pytest.raises(ValueError, match=r"output_attentions=True of LongT5LocalAttention with windows of LongT5"):
        model(**tokens, output_attentions=True)
    model = t5("eager", family="LongT5", encoder_attention_type="transient-global", global_block_size=4)
    before, report = model.encoder(**tokens).last_hidden_state, convert(model, PATTERN)
    assert report.kept == tuple(f"encoder.block.{i}.layer.0.TransientGlobalSelfAttention" for i in range(2))
    assert len(report.layers) == 4
    assert torch.equal(model.encoder(**tokens).last_hidden_state, before)


def test_a_pattern_and_the_gradients_of_both_tables():
    package.AttentionInterface.register("counted", counted)
    inputs = dict(input_ids=sequences((23,))[0][None], decoder_input_ids=sequences((16,))[0][None])
    models = t5("dilkit_sparse"), t5("counted")
    logits = [model(**inputs).logits for model in models]
    assert_close(*logits, **CLOSE)
    for x in logits:
        x.square().mean().backward()
    for ours, theirs in zip(*map(tables, models), strict=True):
        assert theirs.grad.abs().max() > 1e-4
        assert_close(ours.grad, theirs.grad, **CLOSE)


class Adapter(torch.nn.Module):
    """A frozen table with a factor that is learned, and without an attribute `weight`."""

    def __init__(self, child):
        super().__init__()
        self.child, self.factor = child.requires_grad_(requires_grad=False), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, buckets: Tensor):
        return self.child(buckets) * self.factor


def test_a_table_with_an_adapter_in_checkpoints():
    gradients = []
    for name in ("eager", "dilkit"):
        model = t5(name, "EncoderModel").train()
        layer = model.encoder.block[0].layer[0].SelfAttention
        layer.relative_attention_bias = Adapter(layer.relative_attention_bias)
        if name == "dilkit":
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(dict(use_reentrant=True))
        model(**batch()).last_hidden_state.square().mean().backward()
        gradients.append(tables(model)[-1].grad)
    assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize(
    ("family", "cache"), [*diagonal(FAMILIES, ["dynamic", "dilated"]), pytest.param("T5", "static", marks=pytest.mark.slow)]
)
def test_generated_tokens_are_those_of_eager_attention(family, cache):
    options = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False)
    own = package.EncoderDecoderCache(dilated_cache(), package.DynamicCache()) if cache == "dilated" else None
    more = dict(cache_implementation=cache) if own is None else dict(past_key_values=own)
    ours, eager = (t5(name, family=family).generate(**batch(), **options, **x) for name, x in dict(dilkit=more, eager={}).items())
    assert torch.equal(ours, eager)


@each_model
def test_alibi_in_a_cache_that_keeps_a_part(make):
    model, options = make("dilkit_sparse"), dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    prompt = torch.stack(sequences((11, 11)))
    assert torch.equal(*(model.generate(prompt, **options, past_key_values=x) for x in (dilated_cache(), package.DynamicCache())))


def test_no_tensor_of_all_pairs_is_made(monkeypatch):
    model = t5("dilkit", "EncoderModel")
    layer = model.encoder.block[0].layer[0].SelfAttention
    made, compute = [], layer.compute_bias
    monkeypatch.setattr(layer, "compute_bias", lambda *args, **options: made.append(args) or compute(*args, **options))
    with torch.no_grad():
        model(**batch())
    assert made == [(1, 25)]
    assert torch.equal(table_of(layer).table, layer.relative_attention_bias.weight.T[:, t5_buckets(8, 12)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # of torch, at Bloom's own activation
@pytest.mark.parametrize("make", [bloom, mpt, *(partial(t5, kind="EncoderModel", family=x) for x in ("T5", "UMT5", "LongT5"))])
def test_compiled_in_one_graph(make):
    model, options = make("dilkit"), dict(use_cache=False) if make in (bloom, mpt) else {}
    compiled, tokens = torch.compile(model, backend="aot_eager", fullgraph=True), batch()["attention_mask"].bool()
    with torch.no_grad():
        assert_close(*(result(kind, **batch(), **options)[tokens] for kind in (compiled, model)), **CLOSE)


def of_all_pairs():
    layer = t5("dilkit", "EncoderModel").encoder.block[0].layer[0].SelfAttention
    return layer(torch.randn(1, 5, 32), position_bias=torch.zeros(1, 4, 5, 5))


def cached(own, across):
    caches = package.EncoderDecoderCache(own(), across())
    return t5("dilkit")(**batch(), **ANSWER, past_key_values=caches)


def over_ranks():
    model, rows = t5("dilkit", "EncoderModel", "LongT5"), dict(input_ids=sequences((12,))[0][None])
    return run_threads(1, lambda comm: model(**context_parallel(model, comm, pattern=PATTERN).shard(rows)))


REFUSED = {
    "no table": (of_all_pairs, r"position_bias=a tensor \(1, 4, 5, 5\) of T5Attention: a tensor of all pairs is not read"),
    "a cache of other states": (
        partial(cached, package.DynamicCache, dilated_cache),
        r"T5Attention is cross-attention, which a dilated_cache\(\) does not compute",
    ),
    "ranks": (over_ranks, "neither position_ids nor cu_seq_lens_q.*such as LongT5, is not computed over ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_t5_refuses(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words), torch.no_grad():
        call()


def test_a_table_goes_to_the_device_of_the_layer():
    made = PositionBias(lambda: Alibi(torch.ones(2))).on(torch.device("meta"))
    assert made is not None
    assert made.weights.device.type == "meta"
