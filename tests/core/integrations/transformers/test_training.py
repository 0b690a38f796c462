"""Training: compiled, with checkpoints of activations, and with transformers' Trainer."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, WINDOWED, alone, bert, llama, packed, padded, result, sequences, transformers
from torch.testing import assert_close

from dilkit import Pattern
from dilkit.tools import cli
from dilkit.tools.report import registry

package = transformers()
from dilkit.integrations.transformers import register  # noqa: E402
from dilkit.integrations.transformers.patterns import to_config  # noqa: E402
from dilkit.tools.demo import llama as demo  # noqa: E402
from dilkit.tools.demo.trainer import judgements  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=2e-5)


@pytest.fixture(autouse=True)
def registered():
    register(PATTERN)
    torch.compiler.reset()


def gradients(model, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    result(model, **inputs)[tokens].square().sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def one_layer(**options):
    return llama(attn_implementation="dilkit", num_hidden_layers=1, **options)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpoints_of_activations(dropout):
    model, batch = llama(attn_implementation="dilkit", attention_dropout=dropout).train(), padded(sequences(), "left")
    torch.manual_seed(5)
    wanted = gradients(model, **batch)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    torch.manual_seed(5)
    found = gradients(model, **batch)
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert_close(x, wanted[name])


def test_dropout_in_training():
    model, tokens = one_layer(attention_dropout=0.2), torch.stack(sequences((24, 24)))
    with torch.no_grad():
        wanted = result(model, input_ids=tokens)
        assert_close(wanted, result(one_layer(), input_ids=tokens))
        found = torch.stack([result(model.train(), input_ids=tokens) for _ in range(80)])
    assert found.std(0).amax() > 1e-2
    assert_close(found[:, :, -1].mean(0), wanted[:, -1], atol=5 * found[:, :, -1].std(0).amax() / 80**0.5, rtol=0)


def test_dropout_after_a_cached_prefix():
    model, tokens = one_layer(attention_dropout=0.2).train(), sequences((20,))[0][None]
    cache = package.DynamicCache()
    with torch.no_grad():
        torch.manual_seed(5)
        wanted = result(model, input_ids=tokens)
        result(model, input_ids=tokens[:, :9], past_key_values=cache)
        torch.manual_seed(5)
        assert_close(result(model, input_ids=tokens[:, 9:], past_key_values=cache), wanted[:, 9:], **CLOSE)


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "side"), [(llama, "left"), (bert, "right")])
def test_compiled_results_and_gradients_of_a_padded_batch(make, side):
    model, batch = make(attn_implementation="dilkit", num_hidden_layers=1), padded(sequences(), side)
    tokens = batch["attention_mask"].bool()
    with torch.no_grad():
        assert_close(result(compiled(model), **batch)[tokens], result(model, **batch)[tokens], **CLOSE)
    found = gradients(compiled(model), **batch)
    for name, x in gradients(model, **batch).items():
        assert_close(found[f"_orig_mod.{name}"], x, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_compiled_and_packed_with_the_pattern_of_the_configuration():
    register(None, "dilkit_by_config")
    parts = sequences()
    model = llama(attn_implementation="dilkit_by_config", num_hidden_layers=1, dilkit=to_config(PATTERN))
    run = compiled(model)
    with torch.no_grad():
        assert_close(result(run, **packed(parts), use_cache=False)[0], torch.cat(alone(model, parts)), **CLOSE)
        model.config.dilkit = to_config(Pattern([8], [2]))  # another pattern is another graph
        assert_close(result(run, **packed(parts), use_cache=False)[0], torch.cat(alone(model, parts)), **CLOSE)


def batch_of(kind: str, length: int) -> dict[str, torch.Tensor]:
    rows = torch.arange(length) % 40 + 3
    if kind == "packed":
        return packed([rows, rows[:9]])
    batch = dict(input_ids=torch.stack((rows, rows + 5)))
    return batch if kind == "whole" else batch | dict(attention_mask=torch.stack((rows > 7, rows > 0)).long())


def windowed():
    register(None, "dilkit_own")
    return WINDOWED["mistral"](attn_implementation="dilkit_own", num_hidden_layers=1, use_cache=False)


segments = partial(one_layer, use_cache=False)
OTHER_BATCHES = [pytest.param(*x, marks=pytest.mark.slow) for x in ((segments, "whole"), (windowed, "padded"))]


def counting(graphs: list[Any]):
    def backend(graph, _):
        graphs.append(graph)
        return graph

    return backend


@pytest.mark.parametrize(("make", "kind"), [(segments, "packed"), *OTHER_BATCHES])
def test_one_graph_and_one_exported_program_for_all_lengths(make, kind):
    model, batch, graphs = make(), batch_of(kind, 24), []
    sizes = {name: {1: torch.export.Dim("tokens", min=4, max=100)} for name in batch}
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=counting(graphs))
    with torch.no_grad():
        exported = torch.export.export(model, (), batch, dynamic_shapes=sizes, strict=False).module()
        for length in (21, 22, 37, 11):
            batch = batch_of(kind, length)
            tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            for call in (run, exported):
                assert_close(result(call, **batch)[tokens], result(model, **batch)[tokens], **CLOSE)
    assert len(graphs) == 1


class Packed(torch.nn.Module):
    """A layer of sequences packed by their lengths; torch.export does not take dimensions of `**kwargs`."""

    def __init__(self):
        super().__init__()
        self.layer = bert(attn_implementation="dilkit", num_hidden_layers=1).encoder.layer[0].attention.self

    def forward(self, rows: torch.Tensor, starts: torch.Tensor, of_keys: torch.Tensor, longest) -> torch.Tensor:
        where = dict(cu_seq_lens_q=starts, cu_seq_lens_k=of_keys, max_length_q=longest, max_length_k=longest)
        return self.layer(rows, **where)[0]


@pytest.mark.parametrize("counted", [int, pytest.param(torch.tensor, marks=pytest.mark.slow)])
def test_one_graph_for_all_lengths_that_are_given(counted):
    def batch(*lengths):
        starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return torch.randn(1, sum(lengths), 32), starts, starts.clone(), counted(max(lengths))

    layer, graphs, sizes = Packed(), [], {0: torch.export.Dim("sequences", min=1)}
    each = {1: torch.export.Dim("tokens", min=2, max=100)}, sizes, sizes, torch.export.Dim.DYNAMIC if counted is int else None

    fixed, run = (torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counting(graphs)) for dynamic in (False, True))
    with torch.no_grad():
        exported = torch.export.export(layer, batch(5, 9), dynamic_shapes=each, strict=False).module()
        given = batch(5, 9)
        assert_close(fixed(*given), layer(*given), **CLOSE)
        for lengths in ((5, 9), (9, 6), (4, 1, 7), (12,)):
            given = batch(*lengths)
            for call in (run, exported):
                assert_close(call(*given), layer(*given), **CLOSE)
        assert len(graphs) == 2
        rows, starts, of_keys, longest = given
        for call in (run, exported):
            with pytest.raises(RuntimeError, match="cu_seq_lens_q and cu_seq_lens_k differ; the same is needed"):
                call(rows, starts, of_keys + 1, longest)


@pytest.mark.slow
def test_compiled_steps_against_a_cache_of_fixed_size():
    model, tokens = one_layer(), torch.stack(sequences((20, 20)))
    cache = package.StaticCache(config=model.config, max_cache_len=32)
    run, outs = compiled(model), []
    with torch.no_grad():
        outs.append(result(model, input_ids=tokens[:, :9], past_key_values=cache))
        for i in range(9, 20):
            outs.append(result(run, input_ids=tokens[:, i : i + 1], past_key_values=cache))
        assert_close(torch.cat(outs, 1), result(model, input_ids=tokens), **CLOSE)


def test_a_compiled_prompt_against_a_cache_of_fixed_size_is_refused():
    model, tokens = one_layer(), torch.stack(sequences((20, 20)))
    cache = package.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        result(model, input_ids=tokens[:, :9], past_key_values=cache)
        with pytest.raises(Exception, match=r"leave the prompt out of torch\.compile"):
            compiled(model)(input_ids=tokens[:, 9:], past_key_values=cache)


def test_both_trainings_of_the_demo_go_on_from_the_same_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "CONTEXT", 64)
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for text in texts:
        text.write_text(f"{text.name} in little words " * 40)
    words = ["demo", "--llama", "--steps", "2", "--text", *map(str, texts), "--out", str(tmp_path)]
    assert cli.main([*words, "--image"]) == 2
    assert "--image: has no meaning with --llama" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert "model.layers.3.self_attn (LlamaAttention): sdpa -> Pattern([128, 1024], [1, 8])" in capsys.readouterr().err
    courses = [judgements(registry.read(tmp_path / "report.json"), name) for name in (demo.BEFORE, demo.DILATED, demo.FULL)]
    before, dilated, full = ([point["loss"] for point in course] for course in courses)
    assert before[-1] == full[0] != dilated[0]
    assert full[-1] < before[0]
    assert f"{dilated[-1]:.3f} after 2 steps more" in registry.sentence_of(tmp_path / "report.json")
