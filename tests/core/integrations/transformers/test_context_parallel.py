"""Sequences that are cut over ranks inside transformers' models: what one rank computes of the whole."""

import copy
import re
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, SIZES, WINDOWED, llama, padded, qwen3, sequences, transformers
from helpers.project import ROOT
from torch import Tensor
from torch.testing import assert_close

from dilkit import Pattern
from dilkit.comm import Comm, PlanMismatch, over_ranks as calls, run_threads, sum_over_ranks

package = transformers()
from dilkit.integrations.transformers import ContextParallel, context_parallel, convert, dilated_cache, register  # noqa: E402
from dilkit.integrations.transformers.context.batch import whole_batch  # noqa: E402

IGNORED = -100
PAGE = (ROOT / "docs/transformers.md").read_text()
MODELS = dict(llama=llama, qwen3=qwen3, **WINDOWED)


def labelled(**batch: Tensor) -> dict[str, Tensor]:
    labels = batch["input_ids"].clone()
    if "attention_mask" in batch:
        labels[batch["attention_mask"] == 0] = IGNORED
    labels[:, 7] = IGNORED
    return dict(**batch, labels=labels)


CU_SEQLENS = torch.tensor([0, 9, 42, 46], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in (9, 33, 4)])[None]
BATCHES = {
    "two sequences": labelled(input_ids=torch.stack(sequences((30, 30)))),
    "padding": labelled(**{name: x for name, x in padded(sequences((5, 30, 12)), "right").items() if name != "position_ids"}),
    "packed": labelled(
        input_ids=torch.cat(sequences((9, 33, 4)))[None],
        position_ids=POSITIONS,
        cu_seq_lens_q=CU_SEQLENS,
        cu_seq_lens_k=CU_SEQLENS,
    ),
}


def llama_of(pattern: Pattern):
    model = llama()
    convert(model, pattern, "dilkit_context")
    return model


def of_one_rank(model, batch: dict[str, Tensor]) -> tuple[Tensor, float, dict[str, Tensor]]:
    out = model(**batch, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), out.loss.item(), {name: p.grad for name, p in model.named_parameters()}


def over_ranks(size: int, model, batch: dict[str, Tensor], **options) -> list[Any]:
    models = [copy.deepcopy(model) for _ in range(size)]

    def on_rank(comm):
        mine = models[comm.rank]
        ranks = context_parallel(mine, comm, averages=False, **options)
        out = mine(**ranks.shard(batch), use_cache=False)
        out.loss.backward()
        gradients = {name: p.grad for name, p in mine.named_parameters()}
        sum_over_ranks(gradients.values(), comm)
        return ranks.unshard(out.logits), ranks.mean(out.loss), gradients

    return run_threads(size, on_rank)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2", "gpt_oss", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mistral", "qwen2", "qwen3", "gemma3"))],
)
def test_every_model_computes_what_one_rank_computes(name, batch):
    model, inputs = MODELS[name](), BATCHES[batch]
    convert(model, None if name in WINDOWED else PATTERN, "dilkit_context")
    logits, loss, gradients = of_one_rank(copy.deepcopy(model), inputs)
    tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    for theirs, total, summed in over_ranks(3, model, inputs):
        assert_close(theirs.reshape(-1, logits.shape[-1]), logits[tokens], atol=2e-5, rtol=2e-5)
        assert total == pytest.approx(loss, rel=1e-5)
        for key, expected in gradients.items():
            assert_close(summed[key], expected, atol=2e-5, rtol=2e-4, msg=key.__add__)


@pytest.mark.parametrize("lengths", [(9, 33, 4), (23, 23)], ids=["within a rank", "where a rank begins"])
def test_positions_that_begin_anew_are_packed_sequences(lengths):
    """Packed where the model's own mask is: gpt-oss's has no positions, and none is cut with a cache."""
    batch = labelled(input_ids=BATCHES["packed"]["input_ids"], position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    logits, loss, _ = of_one_rank(llama_of(PATTERN), batch)
    for theirs, total, _ in over_ranks(2, llama_of(PATTERN), batch):
        assert_close(theirs, logits, atol=2e-5, rtol=2e-5)
        assert total == pytest.approx(loss, rel=1e-5)


def test_positions_that_do_not_begin_at_0_are_warned_of():
    batch, model = BATCHES["two sequences"] | dict(position_ids=torch.arange(5, 35)[None]), llama_of(PATTERN)
    with pytest.warns(UserWarning, match="position_ids begin at 5"):
        logits, *_ = of_one_rank(copy.deepcopy(model), batch)
    with pytest.warns(UserWarning, match="position_ids begin at 5"):
        found, *_ = over_ranks(2, model, batch)
    assert_close(found[0], logits, atol=2e-5, rtol=2e-5)


COUNTING = dict(
    OPT=dict(ffn_dim=48, word_embed_proj_dim=32),  # counts attention_mask
    Roberta=dict(is_decoder=True),  # counts what is no padding, from pad_token_id + 1 on
)


@pytest.mark.parametrize("name", COUNTING)
def test_positions_that_a_model_counts_are_those_of_the_whole_batch(name):
    torch.manual_seed(1)
    model = getattr(package, f"{name}ForCausalLM")(getattr(package, f"{name}Config")(**SIZES | COUNTING[name])).eval()
    batch = padded(sequences((5, 30, 12)), "left")
    del batch["position_ids"]
    batch = labelled(**batch)
    tokens = batch["attention_mask"].bool()
    batch["labels"][~tokens.roll(1, 1)] = IGNORED  # one process predicts the first token from padding
    logits, loss, _ = of_one_rank(copy.deepcopy(model), batch)
    for theirs, total, _ in over_ranks(2, model, batch):
        assert_close(theirs[0], logits[tokens], atol=2e-5, rtol=2e-5)
        assert total == pytest.approx(loss, rel=1e-5)


def test_a_model_that_has_no_pattern_computes_what_it_computed():
    for options in (dict(schedule=None), dict(schedule="ring"), dict(keep="nothing")):
        items = torch.tensor(77) if options.get("keep") else 77
        model, batch = llama(), dict(BATCHES["two sequences"], num_items_in_batch=items)
        logits, loss, _ = of_one_rank(copy.deepcopy(model), batch)
        for theirs, total, _ in over_ranks(2, model, batch, **options):
            assert_close(theirs, logits, atol=2e-5, rtol=2e-5)
            assert total == pytest.approx(loss, rel=1e-5)


def test_windows_of_the_part_for_text():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    text = dict(sizes, num_key_value_heads=2, head_dim=8, vocab_size=64, sliding_window=6, layer_types=["sliding_attention"])
    places = dict(mm_tokens_per_image=4, image_token_index=63, boi_token_index=61, eoi_token_index=62)
    config = package.Gemma3Config(text_config=text, vision_config=dict(sizes, image_size=16, patch_size=4), **places)
    model, batch = package.Gemma3Model(config).eval(), dict(input_ids=sequences((30,))[0][None].clamp(max=60))
    models = [copy.deepcopy(model) for _ in range(2)]
    register(None)

    def on_rank(comm):
        ranks = context_parallel(models[comm.rank], comm)
        assert ranks.count(batch) == 0
        return ranks.unshard(models[comm.rank](**ranks.shard(batch)).last_hidden_state)

    for theirs in run_threads(2, on_rank):
        assert_close(theirs, model(**batch).last_hidden_state, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["T5", "UMT5"])
@pytest.mark.parametrize("side", ["", "left"])
def test_a_position_bias_is_that_of_the_whole_sequence(family, side):
    sizes = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, dropout_rate=0.0)
    torch.manual_seed(1)
    config = getattr(package, f"{family}Config")(**sizes, relative_attention_num_buckets=8, relative_attention_max_distance=12)
    whole = getattr(package, f"{family}EncoderModel")(config).eval()
    convert(whole, PATTERN)
    inputs = padded(sequences((5, 30, 12)), "left") if side else dict(input_ids=torch.stack(sequences((30, 30))))
    inputs.pop("position_ids", None)
    models = [copy.deepcopy(whole) for _ in range(3)]

    def on_rank(comm):
        ranks = context_parallel(models[comm.rank], comm, averages=False)
        rows = models[comm.rank](**ranks.shard(inputs)).last_hidden_state
        rows.square().sum().backward()
        gradients = [p.grad for p in models[comm.rank].parameters()]
        sum_over_ranks(gradients, comm)
        return ranks.unshard(rows), gradients

    rows = whole(**inputs).last_hidden_state[inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()]
    rows.square().sum().backward()
    for found, gradients in run_threads(3, on_rank):
        assert_close(found.flatten(0, 1), rows.detach(), atol=2e-5, rtol=2e-5)
        for ours, theirs in zip(gradients, whole.parameters(), strict=True):
            assert_close(ours, theirs.grad, atol=2e-4, rtol=2e-4)


def test_the_loss_is_weighted_by_the_tokens_of_all_replicas_and_batches():
    """Two replicas of one rank and two batches a step have different numbers of labels."""
    model, batches = llama(), list(BATCHES.values())
    steps = [[batches[0], batches[1]], [batches[2], batches[1]]]
    models = [copy.deepcopy(model) for _ in steps]

    def on_rank(replicas):
        own, mine = run_alone(), models[replicas.rank]
        ranks = context_parallel(mine, own, replicas=replicas, pattern=PATTERN)
        items = ranks.count(*steps[replicas.rank])
        return sum(ranks.mean(mine(**ranks.shard(batch, items)).loss) for batch in steps[replicas.rank])

    convert(model, PATTERN, "dilkit_context")
    sums = [(model(**batch).loss.item(), whole_batch(batch).labelled) for step in steps for batch in step]
    expected = sum(loss * count for loss, count in sums) / sum(count for _, count in sums)
    assert run_threads(2, on_rank) == pytest.approx([expected] * 2, rel=1e-5)


def test_the_example_of_the_page_holds_on_two_threads():
    example = next(iter(re.findall(r'^```python title="windows.py"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)))
    names = {"__name__": "windows"}
    exec(compile(example, "windows.py", "exec"), names)
    run_threads(2, names["main"])


def run_alone() -> Comm:
    (comm,) = run_threads(1, lambda comm: comm)
    return comm


def of_ids(count: int = 46, **batch) -> dict[str, Any]:
    return dict(input_ids=torch.ones(1, count), **batch)


LEFT = torch.arange(46)[None] > 3
WRONG = {
    "no mapping": (torch.ones(1, 8), r"batch is a Tensor; a mapping is needed, such as dict\(input_ids"),
    "an unknown tensor": (of_ids(pixel_values=torch.ones(1)), "batch has 'pixel_values'; what is cut along"),
    "nothing": ({}, "input_ids or inputs_embeds"),
    "another shape": (of_ids(8, labels=torch.ones(1, 7)), r"labels has shape \(1, 7\), but input_ids is of 1"),
    "a mask of ones and packed positions": (
        of_ids(position_ids=POSITIONS, attention_mask=torch.ones(1, 46)),
        r"position_ids begin anew .* with an attention_mask .* takes the row for one sequence; leave attention_mask out",
    ),
    "other keys": (
        of_ids(cu_seq_lens_q=CU_SEQLENS, cu_seq_lens_k=CU_SEQLENS[1:]),
        "cu_seq_lens_q, .* and cu_seq_lens_k, .* differ",
    ),
    "padding": (of_ids(cu_seq_lens_q=CU_SEQLENS, attention_mask=LEFT), "cu_seq_lens_q and an attention_mask with padding"),
    "a mask of pairs": (of_ids(8, attention_mask=torch.ones(1, 8, 8)), r"attention_mask has shape \(1, 8, 8\)"),
    "too few tokens": (of_ids(1), "seq=1 tokens cannot be shared out over world_size=2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_cannot_be_cut_is_refused_on_all_ranks(name):
    batch, text = WRONG[name]

    def on_rank(comm):
        with pytest.raises((ValueError, TypeError), match=text):
            ContextParallel(comm).shard(batch)

    run_threads(2, on_rank)


def drop(model, ranks: ContextParallel):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()(**ranks.shard(BATCHES["packed"]))


def generate(model, ranks: ContextParallel):
    tokens = dict(input_ids=torch.arange(3, 13)[None], position_ids=torch.arange(10)[None])
    model.generate(**ranks.shard(tokens), max_new_tokens=3, do_sample=False)


def on_other_pattern(model, ranks: ContextParallel):
    ranks = context_parallel(model, ranks.comm, pattern=Pattern([4 * (1 + ranks.comm.rank)], [1]))
    model(**ranks.shard(BATCHES["two sequences"]))


PACKED = {name: x for name, x in BATCHES["packed"].items() if not name.startswith("cu_seq")}
TWO, PADDED = BATCHES["two sequences"], BATCHES["padding"]
ONE_SEQUENCE = "begin anew or jump within a row, but transformers' mask takes the row for one sequence"
LEFT_IN = r"attention_mask has padding.*ContextParallel\.shard"
REFUSED = {
    "not cut": (lambda model, ranks: model(TWO["input_ids"]), r"rank 1 has positions 0 to 29.*ContextParallel\.shard"),
    "padding": (lambda model, ranks: model(**PADDED), LEFT_IN),
    "padding, compiled": (lambda model, ranks: model(**PADDED), LEFT_IN),
    "packed, with a cache": (lambda model, ranks: model(**ranks.shard(PACKED)), ONE_SEQUENCE),
    "packed, of a gpt-oss": (lambda model, ranks: model(**ranks.shard(PACKED), use_cache=False), ONE_SEQUENCE),
    "generation": (generate, "generate with a model that context_parallel was not called on"),
    "a cache that leaves tokens out": (
        lambda model, ranks: model(**ranks.shard(TWO), past_key_values=dilated_cache()),
        r"Attention under context_parallel with a dilated_cache\(\)",
    ),
    "dropout of packed sequences": (drop, "dropout of packed sequences over ranks is not computed"),
    "another pattern": (on_other_pattern, "pattern"),
    "other batches": (
        lambda model, ranks: ranks.shard(dict(input_ids=torch.full((1, 8), ranks.comm.rank))),
        r"batch of ContextParallel\.shard.*input_ids",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_on_all_ranks(name, monkeypatch):
    call, text = REFUSED[name]
    models = [(WINDOWED["gpt_oss"] if "gpt-oss" in name else llama)() for _ in range(2)]

    def on_rank(comm):
        model = models[comm.rank]
        with pytest.raises(PlanMismatch if "other" in name else ValueError, match=text):
            call(model, context_parallel(model, comm, pattern=PATTERN))

    if "compiled" in name:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    run_threads(2, on_rank)


NOT_BY_ROWS = {
    "LlamaForSequenceClassification": (dict(num_labels=2), r"it pools rows.*ForSequenceClassification"),
    "BertModel": ({}, "it pools rows.*add_pooling_layer=False"),
    "WhisperForCausalLM": (dict(decoder_attention_heads=4, decoder_layers=1), "it pools rows, or weights its loss by itself"),
    "Lfm2ForCausalLM": (dict(layer_types=["conv", "full_attention"]), "it has layers of conv, which mix rows"),
    "GptOssForCausalLM": (dict(output_router_logits=True, num_local_experts=2), "it adds a loss of its routers"),
    "BartModel": (dict(is_encoder_decoder=False, encoder_layers=1), "it takes no position_ids"),
    "SwitchTransformersEncoderModel": (dict(num_sparse_encoder_layers=1), r"it has encoder\.\S+router, which mixes rows"),
    "LlamaForCausalLM": (dict(token_dropout=True), "it scales its embeddings by the mask tokens"),
}


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_models_that_mix_rows_beside_attention_are_refused(name):
    (options, text), kind = NOT_BY_ROWS[name], getattr(package, name)
    model = kind(kind.config_class(**SIZES | options))
    with pytest.raises(ValueError, match=text.replace("it", name, 1)):
        context_parallel(model, run_alone())
    with pytest.raises(TypeError, match="mesh=None; a DeviceMesh of one dimension"):
        context_parallel(llama(), None)


def test_sequences_whose_length_chooses_rotary_frequencies_are_refused():
    """A rank with the first rows would choose those of short ones."""
    model = llama(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=20)
    ranks, tokens = context_parallel(model, run_alone(), pattern=PATTERN), torch.ones(1, 21, dtype=torch.long)
    ranks.shard(dict(input_ids=tokens[:, 1:]))
    with pytest.raises(ValueError, match="the batch has 21 positions, and beyond 20"):
        ranks.shard(dict(input_ids=tokens))


def test_full_attention_is_balanced_and_windows_send_least(monkeypatch):
    model, schedules = MODELS["gemma3"](), []

    def attend(*inputs, schedule, keep, **options):
        schedules.append(schedule)
        assert keep == "rows"
        return original(*inputs, schedule=schedule, keep=keep, **options)

    original = calls.attend
    monkeypatch.setattr(calls, "attend", attend)
    convert(model, None, "dilkit_context")
    over_ranks(1, model, BATCHES["two sequences"])
    assert schedules == ["auto", "balanced"]
