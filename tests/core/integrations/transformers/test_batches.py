"""A sequence gets in a batch what it gets alone: padded, packed or from caches. Windows are those of eager attention."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from helpers.language_models import (
    LENGTHS,
    MODELS,
    PATTERN,
    SIZES,
    TWO_SIDED,
    WINDOW,
    WINDOWED,
    alone,
    deepseek,
    deepseek_v2,
    llama,
    packed,
    padded,
    result,
    sequences,
    transformers,
)
from helpers.pairwise import every_pair
from torch.testing import assert_close

from dilkit import GlobalTokens, Pattern, SlidingWindow
from dilkit.comm import run_threads

package = transformers()
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask  # noqa: E402

from dilkit.integrations.transformers import context_parallel, convert, dilated_cache, register  # noqa: E402
from dilkit.integrations.transformers.checks import check_own  # noqa: E402
from dilkit.integrations.transformers.sequences import TokenMask  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=2e-5)


EVERY = MODELS | {f"{name} with windows": make for name, make in WINDOWED.items()}
"""The latter compute their own windows, which tests below compare with eager attention."""
SIDES = [row for row in product(EVERY, ["left", "right", "between"]) if "windows" not in row[0] or row[1] != "between"]


@pytest.fixture(autouse=True)
def registered():
    register(None)


@pytest.fixture(params=EVERY)
def any_model(request):
    if "windows" not in request.param:
        register(PATTERN)
    with torch.no_grad():
        yield EVERY[request.param](attn_implementation="dilkit")


@pytest.mark.parametrize(("any_model", "side"), SIDES, indirect=["any_model"])
def test_a_padded_sequence_gets_what_it_gets_alone(any_model, side):
    batch = padded(sequences(), side)
    tokens = batch["attention_mask"].bool()
    parts = [ids[own] for ids, own in zip(batch["input_ids"], tokens, strict=True)]
    for found, own, wanted in zip(result(any_model, **batch), tokens, alone(any_model, parts), strict=True):
        assert_close(found[own], wanted, **CLOSE)


@pytest.mark.parametrize("any_model", [x for x in EVERY if "bert" not in x and "gpt_oss" not in x], indirect=True)
def test_packed_by_positions_in_a_batch_of_two(any_model):
    parts = sequences((7, 16, 11, 5, 7))
    first, second = packed(parts[:2]), packed(parts[2:])
    out = result(any_model, **{name: torch.cat((first[name], second[name])) for name in first}, use_cache=False)
    assert_close(out.flatten(0, 1), torch.cat(alone(any_model, parts)), **CLOSE)


ONE_SEQUENCE = {
    "a cache": ("llama", dict(use_cache=True)),
    "a mask of ones": ("llama", dict(use_cache=False, attention_mask=torch.ones(1, sum(LENGTHS), dtype=torch.int64))),
    "positions kept from the mask": ("gpt_oss", dict(use_cache=False)),
}


@pytest.mark.parametrize("case", ONE_SEQUENCE)
@pytest.mark.parametrize("jumps", [False, True], ids=["begin anew", "jump"])
def test_positions_cut_a_row_where_transformers_cuts_it(case, jumps):
    register(Pattern.dense(), "dilkit_dense")
    name, options = ONE_SEQUENCE[case]
    batch = packed(sequences()) | options
    if jumps:
        batch["position_ids"] = torch.arange(sum(LENGTHS))[None] + 5 * (torch.arange(sum(LENGTHS)) > 20)
    with torch.no_grad():
        wanted = result(MODELS[name](attn_implementation="eager"), **batch)
        with pytest.warns(UserWarning, match="takes the row for one sequence, and so does dilkit"):
            found = result(MODELS[name](attn_implementation="dilkit_dense"), **batch)
    assert_close(found, wanted, **CLOSE)


PAIRS = torch.ones(2, 1, 16, 16).tril().bool()
PAIRS[0, :, 9:, 3:5], PAIRS[1, :, 6:, 2], PAIRS[1, :, 9, 5] = False, False, False
LOWEST = [-1e9, torch.finfo(torch.float32).min, -torch.inf]
BLOCKS = torch.tensor([[-1] * 2 + [0] * 5 + [-1] * 2 + [1] * 7, [0] * 9 + [-1] * 7])


def masks_of(config) -> dict[Any, Any]:
    """Return masks of 16 rows, of their last five, and of the model with blocks that see each other, beside a window too."""
    made = dict(block_sequence_ids=BLOCKS, attention_mask=torch.ones(2, 16).bool(), past_key_values=None, position_ids=None)
    made |= dict(config=config, inputs_embeds=torch.zeros(2, 16, 32))
    made["attention_mask"][0, :3] = False
    kinds = dict(full_attention=create_causal_mask(**made), sliding_attention=create_sliding_window_causal_mask(**made))
    floats = {lowest: torch.zeros(PAIRS.shape).masked_fill(~PAIRS, lowest) for lowest in LOWEST}
    heads = PAIRS & (torch.arange(16) != torch.arange(1, 5)[:, None, None]) | torch.eye(16).bool()
    return floats | dict(bools=PAIRS, one=PAIRS[:1], heads=heads, row=PAIRS[:, :, -1:], last=PAIRS[:, :, -5:], blocks=kinds)


@pytest.mark.parametrize("kind", ["bools", *LOWEST, "one", "heads", "row", "last", "blocks"])
def test_masks_of_pairs(kind):
    """Logits, weights and gradients are those of eager attention, also of the last rows after a cache."""
    outcomes = []
    for attention in ("eager", "dilkit"):
        model = WINDOWED["gemma3"](attn_implementation=attention, sliding_window=4, attn_logit_softcapping=None)
        mask = masks_of(model.config)[kind]
        if attention == "eager" and kind != "blocks":  # which adds it
            mask = torch.zeros(mask.shape).masked_fill(~mask, LOWEST[0]) if mask.dtype is torch.bool else mask
        tokens, cache = torch.arange(3, 35).view(2, 16), package.DynamicCache()
        if kind == "last":
            model(tokens[:, :11], past_key_values=cache)
            tokens = tokens[:, 11:]
        out = model(tokens, attention_mask=mask, past_key_values=cache, output_attentions=True)
        seen = slice(None) if kind != "blocks" else slice(3, None)  # rows of padding are not compared
        out.logits[:, seen].square().sum().backward()
        grads = [x.grad for x in model.parameters()]
        outcomes.append([out.logits[:, seen], *(x[:, :, seen] for x in out.attentions), *grads])
    for found, wanted in zip(*outcomes, strict=True):
        assert_close(found, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_compiled_a_cache_keeps_a_row_whole():
    register(Pattern.dense(), "dilkit_dense")
    batch = packed(sequences())
    with torch.no_grad():
        for cached in (False, True):
            model, eager = (llama(attn_implementation=kind) for kind in ("dilkit_dense", "eager"))
            found = torch.compile(model, backend="eager")(**batch, use_cache=cached).logits
            assert_close(found, result(eager, **batch, use_cache=cached), **CLOSE)


def test_packed_by_cu_seqlens(any_model):
    parts = sequences()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    where = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    out = result(any_model, **packed(parts), **where, use_cache=False)
    assert_close(out[0], torch.cat(alone(any_model, parts)), **CLOSE)


def test_gradients_of_a_padded_batch_and_after_a_cached_prefix():
    register(PATTERN)
    model, parts, cache = llama(attn_implementation="dilkit"), sequences(), package.DynamicCache()
    batch, tokens = padded(parts, "left"), parts[2][None]

    def gradients(*outs):
        return torch.autograd.grad(sum(out.square().sum() for out in outs), [*model.parameters()])

    found = gradients(result(model, **batch)[batch["attention_mask"].bool()])
    assert_close(found, gradients(*alone(model, parts)), atol=1e-4, rtol=1e-4)
    found = gradients(*(result(model, input_ids=part, past_key_values=cache) for part in tokens.split([9, 14], 1)))
    assert_close(found, gradients(result(model, input_ids=tokens)), atol=1e-4, rtol=1e-4)


def test_the_configuration_names_patterns_by_layer(tmp_path):
    register(None, "dilkit_by_config")
    patterns = [Pattern([8], [1]), PATTERN]
    stated = [{"segment_lengths": [8], "dilation_rates": [1]}, PATTERN.to_json()]
    model = llama(attn_implementation="dilkit_by_config", dilkit=stated)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="dilkit_by_config").eval()
    assert loaded.config.dilkit == stated
    register(patterns, "dilkit_by_argument")
    tokens = sequences((40,))[0][None]
    with torch.no_grad():
        wanted = result(llama(attn_implementation="dilkit_by_argument"), input_ids=tokens)
        assert_close(result(model, input_ids=tokens), wanted)
        assert_close(result(loaded, input_ids=tokens), wanted)


STEPS = 20
WAYS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=1.5),
    "beams": dict(do_sample=False, num_beams=3),
}


QUICK = ("llama", "gpt_oss", "mistral with windows", "gemma3 with windows")
"""With grouped heads, with sinks, with windows in all layers or in every other one; the others are marked slow."""
CAUSAL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS if name != "bert"]
OTHERS = [name for name in EVERY if name not in ("bert", *QUICK)]
KINDS = {
    "of all tokens": lambda model, capacity: package.DynamicCache(),
    "of the model": lambda model, capacity: package.DynamicCache(config=model.config),  # windows alone, in layers that have one
    "of fixed size": lambda model, capacity: package.StaticCache(config=model.config, max_cache_len=capacity),
}


def each_model(*axes) -> list[Any]:
    slow = [pytest.param(*row, marks=pytest.mark.slow) for row in product(OTHERS, *axes)]
    return [*every_pair(QUICK, *axes), *slow]


@pytest.fixture(params=CAUSAL)
def model(request):
    if "windows" not in request.param:
        register(PATTERN)
    return EVERY[request.param](attn_implementation="dilkit")


CHUNKS = ((7, 1, 1, 1, 1, 1, 1, 1, 1, 1), (1, 14, 1), (5, 6, 5))


@pytest.mark.parametrize(("model", "kind", "chunks"), each_model(KINDS, CHUNKS), ids=str, indirect=["model"])
def test_chunks_against_a_cache(model, kind, chunks):
    tokens = torch.stack(sequences((sum(chunks),)) * 2)
    cache, outs, start = KINDS[kind](model, 32), [], 0
    with torch.no_grad():
        for rows in chunks:
            own = dict(input_ids=tokens[:, start : start + rows], position_ids=torch.arange(start, start + rows)[None])
            outs.append(result(model, **own, past_key_values=cache))
            start += rows
        assert_close(torch.cat(outs, 1), result(model, input_ids=tokens), **CLOSE)


@pytest.mark.parametrize(("model", "kind", "way"), each_model(KINDS, WAYS), indirect=["model"])
def test_generation_from_a_left_padded_batch(model, kind, way):
    batch = padded(sequences(), "left")
    del batch["position_ids"]
    cache = KINDS[kind](model, max(LENGTHS) + STEPS)
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


def check_beams(model, made: torch.Tensor):
    options = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=0, **WAYS["beams"])
    for row, part in zip(made, sequences(), strict=True):
        assert torch.equal(row[-STEPS:], model.generate(part[None], **options)[0, -STEPS:])


def test_a_prompt_padded_on_the_right_goes_on(model):
    parts = sequences((5, 12))
    batch, cache = padded(parts, "right"), package.DynamicCache()
    new = torch.tensor([[7], [8]])
    with torch.no_grad():
        result(model, **batch, past_key_values=cache)
        mask = torch.cat((batch["attention_mask"], torch.ones(2, 1, dtype=torch.int64)), 1)
        out = result(model, input_ids=new, attention_mask=mask, position_ids=torch.tensor([[5], [12]]), past_key_values=cache)
        for found, part, token in zip(out, parts, new, strict=True):
            assert_close(found[0], result(model, input_ids=torch.cat((part, token))[None])[0, -1], **CLOSE)


@pytest.mark.parametrize("kind", ["of all tokens", "of fixed size"])
def test_a_prompt_in_chunks_with_padding_on_the_left(model, kind):
    """A chunk may hold padding, and one sequence none of its tokens yet."""
    parts = sequences((3, 20))
    batch = padded(parts, "left")
    cache, outs = KINDS[kind](model, 32), []
    with torch.no_grad():
        for start, stop in ((0, 8), (8, 18), (18, 20)):
            own = {name: batch[name][:, start:stop] for name in ("input_ids", "position_ids")}
            outs.append(result(model, **own, attention_mask=batch["attention_mask"][:, :stop], past_key_values=cache))
        out = torch.cat(outs, 1)
        for found, part in zip(out, parts, strict=True):
            assert_close(found[-len(part) :], result(model, input_ids=part[None])[0], **CLOSE)


def test_gpt_2_with_a_static_cache():
    """It flattens masks of fewer than four dimensions, also the one that `generate` has made."""
    sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    model, batch = package.GPT2LMHeadModel(package.GPT2Config(**sizes)).eval(), padded(sequences(), "left")
    convert(model, PATTERN)
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    static, dynamic = (model.generate(**batch, **options, cache_implementation=kind) for kind in ("static", None))
    assert torch.equal(static, dynamic)


@pytest.mark.parametrize("make", [deepseek, deepseek_v2])
def test_latent_attention_with_values_of_another_width_than_keys(make):
    """Its cache keeps latents, of which the model makes keys and values again."""
    register(Pattern.dense(), "dilkit_dense")
    models = [make(attn_implementation=name) for name in ("dilkit_dense", "eager")]
    batch = padded(sequences(), "left")
    del batch["position_ids"]
    options = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    assert torch.equal(*(model.generate(**batch, **options) for model in models))
    logits = [result(model, **batch, use_cache=False)[batch["attention_mask"].bool()] for model in models]
    assert_close(*logits, **CLOSE)
    for x in logits:
        x.square().sum().backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_close(mine.grad, theirs.grad, **CLOSE)
    with torch.no_grad(), pytest.raises(ValueError, match="as DeepSeek does its latents; give a DynamicCache"):
        models[0].generate(**batch, **options, past_key_values=dilated_cache())


TOKENS = sequences((30,))[0][None]


def pair(name: str, **options) -> tuple[Any, Any]:
    ours, eager = (WINDOWED[name](attn_implementation=kind, **options) for kind in ("dilkit", "eager"))
    return ours, eager


@pytest.mark.parametrize("name", ["v_proj.weight", "sinks"])
def test_rows_after_a_cache_teach_a_weight_that_neither_queries_nor_keys_have(name):
    gradients = []
    for model in pair("gpt_oss"):
        weight, cache = model.requires_grad_(False).get_parameter(f"model.layers.0.self_attn.{name}"), package.DynamicCache()
        model(TOKENS[:, :20], past_key_values=cache)
        weight.requires_grad_()
        model(TOKENS[:, 20:], past_key_values=cache).logits.square().sum().backward()
        gradients.append(weight.grad)
    assert_close(*gradients, **CLOSE)


HOLES = torch.ones_like(TOKENS)
HOLES[:, 3:5] = HOLES[:, :1] = 0
BETWEEN = dict(input_ids=TOKENS, attention_mask=HOLES)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_counts_padding_between_tokens(name):
    """Also one that is given; over ranks, where padding is left out, that is refused."""
    ours, eager = pair(name)
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        wanted = result(eager, **BETWEEN)[:, HOLES[0].bool()]
        for convert_it in (False, name == "mistral"):
            if convert_it:
                convert(ours, Pattern.mistral(WINDOW))
            assert_close(result(ours, **BETWEEN)[:, HOLES[0].bool()], wanted, **CLOSE)
            assert torch.equal(*(model.generate(**BETWEEN, **options) for model in (ours, eager)))
            (ranks,) = run_threads(1, partial(context_parallel, ours))
            with pytest.raises(ValueError, match="padding between tokens, which windows and position biases of the model count"):
                ranks.shard(BETWEEN)
            short = {key: x[:, 1 : WINDOW + 1] for key, x in BETWEEN.items()}
            assert ranks.shard(short)["input_ids"].shape == (1, WINDOW - 2)
            ours = pair(name)[0]


def test_a_model_of_windows_alone_generates():
    """Its mask without windows, which no layer takes, is of a cache that has left tokens out."""
    made = [
        model.generate(TOKENS, max_new_tokens=4, do_sample=False)
        for model in pair("gemma3", layer_types=["sliding_attention"] * 2)
    ]
    assert torch.equal(*made)


def test_a_pattern_that_is_given_wins():
    register(Pattern.of(SlidingWindow(3)))
    options = dict(max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    ours, _ = pair("mistral")
    _, narrow = pair("mistral", sliding_window=3)
    assert torch.equal(ours.generate(TOKENS, **options), narrow.generate(TOKENS, **options))


@pytest.mark.parametrize(
    "pattern", [PATTERN, Pattern.mistral(WINDOW + 1), Pattern.of(SlidingWindow(2), GlobalTokens(1))], ids=str
)
def test_a_pattern_that_sees_what_a_cache_has_left_out_is_refused(pattern):
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
def test_convert_without_a_pattern_computes_what_the_model_did(name):
    model = WINDOWED[name](attn_implementation="eager")
    with torch.no_grad():
        wanted = result(model, input_ids=TOKENS)
        report = convert(model)
        assert_close(result(model, input_ids=TOKENS), wanted, **CLOSE)
    second = Pattern.mistral(WINDOW) if name == "mistral" else Pattern.dense()
    assert [layer.pattern for layer in report.layers] == [Pattern.mistral(WINDOW), second]
    assert getattr(model.config, "dilkit", None) is None


@pytest.mark.parametrize("side", ["left", "right", "between"])
@pytest.mark.parametrize(("name", "window"), [("modernbert", WINDOW + 1), ("embedding_gemma", WINDOW // 2 + 1)])
def test_windows_on_both_sides_of_a_token(name, window, side):
    ours, eager = (TWO_SIDED[name](attn_implementation=kind) for kind in ("sdpa", "eager"))
    report, batch = convert(ours), padded(sequences(), side)
    assert {layer.pattern for layer in report.layers} == {Pattern.of(SlidingWindow(window)), Pattern.dense()}
    with torch.no_grad():
        assert_close(*(result(model, **batch)[batch["attention_mask"].bool()] for model in (ours, eager)), **CLOSE)
        if name == "embedding_gemma" and side == "right":
            found = torch.compile(ours, backend="eager")(**batch).last_hidden_state
            assert_close(found[batch["attention_mask"].bool()], result(eager, **batch)[batch["attention_mask"].bool()], **CLOSE)


@pytest.mark.parametrize("side", ["left", "right", "between"])
def test_weights_that_are_asked_for(side):
    """The weights are those of eager attention, or of each sequence alone if the pattern counts tokens alone."""
    parts, batch = sequences(), padded(sequences(), side)
    tokens = batch["attention_mask"].bool()
    with torch.no_grad():
        models = pair("gemma3")
        for ours, eager in zip(*(model(**batch, output_attentions=True).attentions for model in models), strict=True):
            assert_close(ours.transpose(1, 2)[tokens], eager.transpose(1, 2)[tokens], **CLOSE)
        register(PATTERN)
        model = llama(attn_implementation="dilkit")
        found = model(**batch, output_attentions=True).attentions[1]
        parts = [ids[own] for ids, own in zip(batch["input_ids"], tokens, strict=True)]
        for weights, own, ids in zip(found, tokens, parts, strict=True):
            assert_close(weights[:, own][:, :, own], model(ids[None], output_attentions=True).attentions[1][0], **CLOSE)
            assert_close(weights.sum(2), own.float().expand(4, -1), **CLOSE)


def test_weights_that_a_model_records_without_telling_its_layers():
    register(None)
    config = package.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0, attn_pdrop=0.1)
    ours = package.GPT2Model._from_config(config, attn_implementation="dilkit").eval()
    batch = padded(sequences(), "right")
    with torch.no_grad():
        found = ours(**batch, output_attentions=True).attentions
        ours.set_attn_implementation("eager")
        for one, other in zip(found, ours(**batch, output_attentions=True).attentions, strict=True):
            tokens = batch["attention_mask"].bool()
            assert_close(one.transpose(1, 2)[tokens], other.transpose(1, 2)[tokens], **CLOSE)
    ours.set_attn_implementation("dilkit")
    with pytest.raises(ValueError, match="output_attentions=True of GPT2Attention with dropout"):
        ours.train()(**batch, output_attentions=True)


def test_windows_that_the_model_does_not_compute_are_refused():
    """A Llama takes any number into its configuration, and computes full attention all the same."""
    ours, eager = (llama(sliding_window=4, attn_implementation=name) for name in ("dilkit", "eager"))
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"has Pattern\.of\(SlidingWindow\(4\)\) by its configuration, but the mask of its"):
            result(ours, input_ids=TOKENS)
        register(Pattern.dense())
        assert_close(result(ours, input_ids=TOKENS), result(eager, input_ids=TOKENS), **CLOSE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(sliding_window=4), f"sliding_window=4 of LlamaAttention, but by the configuration it is {WINDOW} in layer 0"),
        ({}, f"sliding_window={WINDOW} is in the configuration, but LlamaAttention passes none on"),
    ],
)
def test_windows_that_no_mask_shows_are_those_that_a_layer_hands_on(options, words):
    """Masks are hidden, as under `torch.compile`."""
    layer = llama().model.layers[0].self_attn
    with pytest.raises(ValueError, match=words):
        check_own(layer, Pattern.mistral(WINDOW), TokenMask(True, 12, 12), options)
    check_own(layer, Pattern.mistral(WINDOW), TokenMask(True, 12, 12), dict(sliding_window=WINDOW))


@pytest.mark.slow
def test_compiled_padding_that_a_window_counts_is_refused():
    model = torch.compile(pair("mistral")[0], backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="padding between tokens, and distances of the layer count it"):
        result(model, **BETWEEN)


def chunked(**options):
    sizes = dict(SIZES, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=48, attention_chunk_size=WINDOW)
    sizes |= dict(layer_types=["chunked_attention", "full_attention"], num_local_experts=2, **options)
    torch.manual_seed(1)
    return package.Llama4ForCausalLM(package.Llama4TextConfig(**sizes)).eval()


def test_chunks_begin_at_the_first_token_also_where_a_cache_has_left_some_out():
    ours, eager = (chunked(attn_implementation=name) for name in ("dilkit", "eager"))
    options = dict(max_new_tokens=14, min_new_tokens=14, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        assert_close(*(result(model, **BETWEEN)[:, HOLES[0].bool()] for model in (ours, eager)), **CLOSE)
        for batch in (dict(input_ids=BETWEEN["input_ids"]), padded(sequences(), "left"), BETWEEN):
            steps = [
                model.generate(**batch, **options, output_logits=True, return_dict_in_generate=True) for model in (ours, eager)
            ]
            assert_close(*(torch.stack(one.logits) for one in steps), **CLOSE)
        hole = torch.ones(1, 20, dtype=torch.int64)
        hole[0, 18] = 0
        with pytest.raises(ValueError, match="padding where a chunk of 6 tokens begins, and the cache has left out"):
            ours.generate(BETWEEN["input_ids"][:1, :20], attention_mask=hole, **options)
        caches = (dict(past_key_values=package.DynamicCache()) for _ in range(2))
        assert torch.equal(*(model.generate(**BETWEEN, **options, **next(caches)) for model in (ours, eager)))
