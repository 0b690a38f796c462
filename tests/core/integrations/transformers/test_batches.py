"""A sequence in a batch gets what it gets alone: padded on the left or right, packed, with a sink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.language_models import LENGTHS, MODELS, PATTERN, alone, llama, packed, padded, result, sequences, transformers
from torch.testing import assert_close

from dilkit import Pattern

transformers()
from dilkit.integrations.transformers import register  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=2e-5)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    register(PATTERN)
    with torch.no_grad():
        yield MODELS[request.param](attn_implementation="dilkit")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_sequence_gets_what_it_gets_alone(model: Any, side: str) -> None:
    parts = sequences()
    batch = padded(parts, side)
    out = result(model, **batch)
    for found, tokens, wanted in zip(out, batch["attention_mask"].bool(), alone(model, parts), strict=True):
        assert_close(found[tokens], wanted, **CLOSE)


def test_padding_between_tokens(model: Any) -> None:
    tokens = torch.rand(4, 30) < 0.6
    ids = torch.randint(3, 64, tokens.shape)
    places = (tokens.cumsum(1) - 1).clamp(min=0)
    out = result(model, input_ids=ids, attention_mask=tokens.long(), position_ids=places)
    for found, own, wanted in zip(out, tokens, alone(model, [x[y] for x, y in zip(ids, tokens, strict=True)]), strict=True):
        assert_close(found[own], wanted, **CLOSE)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("bert", "gpt_oss")])
def test_packed_by_positions(name: str) -> None:
    register(PATTERN)
    model, parts = MODELS[name](attn_implementation="dilkit"), sequences()
    with torch.no_grad():
        out = result(model, **packed(parts), use_cache=False)
        assert_close(out[0], torch.cat(alone(model, parts)), **CLOSE)


ONE_SEQUENCE = {
    "a cache": ("llama", dict(use_cache=True)),
    "a mask of ones": ("llama", dict(use_cache=False, attention_mask=torch.ones(1, sum(LENGTHS), dtype=torch.int64))),
    "positions kept from the mask": ("gpt_oss", dict(use_cache=False)),
}


@pytest.mark.parametrize("case", ONE_SEQUENCE)
@pytest.mark.parametrize("jumps", [False, True], ids=["begin anew", "jump"])
def test_positions_cut_a_row_where_transformers_cuts_it_and_nowhere_else(case: str, jumps: bool) -> None:
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


@pytest.mark.slow
def test_compiled_a_cache_keeps_a_row_whole() -> None:
    register(Pattern.dense(), "dilkit_dense")
    batch = packed(sequences())
    with torch.no_grad():
        for cached in (False, True):
            model, eager = (llama(attn_implementation=kind) for kind in ("dilkit_dense", "eager"))
            found = torch.compile(model, backend="eager")(**batch, use_cache=cached).logits
            assert_close(found, result(eager, **batch, use_cache=cached), **CLOSE)


def test_packed_by_positions_in_a_batch_of_two() -> None:
    register(PATTERN)
    model, parts = llama(attn_implementation="dilkit"), sequences((7, 16, 11, 12))
    first, second = packed(parts[:2]), packed(parts[2:])
    with torch.no_grad():
        both = {name: torch.cat((first[name], second[name])) for name in first}
        out = result(model, **both, use_cache=False)
        assert_close(out.flatten(0, 1), torch.cat(alone(model, parts)), **CLOSE)


def test_packed_by_cu_seqlens(model: Any) -> None:
    parts = sequences()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    where = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    out = result(model, **packed(parts), **where, use_cache=False)
    assert_close(out[0], torch.cat(alone(model, parts)), **CLOSE)


def test_gradients_of_a_padded_batch_are_those_of_its_sequences() -> None:
    register(PATTERN)
    model, parts = llama(attn_implementation="dilkit"), sequences()
    batch = padded(parts, "left")
    result(model, **batch)[batch["attention_mask"].bool()].square().sum().backward()
    found = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    sum(out.square().sum() for out in alone(model, parts)).backward()
    for name, x in model.named_parameters():
        assert_close(found[name], x.grad, atol=1e-4, rtol=1e-4)


def test_the_configuration_names_patterns_by_layer(tmp_path: Any) -> None:
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
