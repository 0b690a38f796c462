"""Bloom and MPT, whose layers add ALiBi: what their own attention computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, padded, sequences, transformers
from torch import Tensor
from torch.testing import assert_close

from dilkit import Pattern

package = transformers()
from dilkit.integrations.transformers import register  # noqa: E402
from dilkit.integrations.transformers.token_mask import TokenMask  # noqa: E402

CLOSE = dict(atol=2e-5, rtol=2e-5)
HEADS = 3
"""No power of two: some slopes are between those of one."""


@pytest.fixture(autouse=True)
def registered() -> None:
    register(Pattern.dense())
    register(PATTERN, "dilkit_sparse")


def bloom(name: str) -> Any:
    torch.manual_seed(1)
    sizes = dict(hidden_size=8 * HEADS, n_head=HEADS, n_layer=2, vocab_size=64, hidden_dropout=0.0, attention_dropout=0.5)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
    return package.BloomForCausalLM(package.BloomConfig(**sizes, **ends, attn_implementation=name)).eval()


def mpt(name: str) -> Any:
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


def batch(side: str) -> dict[str, Tensor]:
    """Padded on the left, on the right, or in the midst of two sequences."""
    made = padded(sequences(), "right" if side == "between" else side)
    if side == "between":
        made["attention_mask"][1:3, 3:5] = 0
    del made["position_ids"]
    return made


@pytest.mark.parametrize(("make", "side"), [(bloom, "left"), (bloom, "between"), (mpt, "left"), (mpt, "right")])
def test_a_padded_batch_and_its_gradients_are_those_of_eager_attention(make: Any, side: str) -> None:
    inputs, tokens = batch(side), batch(side)["attention_mask"].bool()
    models = [make(name) for name in ("dilkit", "eager")]
    logits = [model(**inputs).logits[tokens] for model in models]
    assert_close(*logits, **CLOSE)
    for x in logits:
        x.square().mean().backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert_close(ours.grad, theirs.grad, **CLOSE)


@each_model
def test_a_pattern_and_its_last_rows_from_a_cache(make: Any) -> None:
    model, tokens = make("dilkit_sparse"), sequences((23,))[0][None]
    with torch.no_grad():
        whole = model(tokens).logits
        cache = model(tokens[:, :9], use_cache=True).past_key_values
        assert_close(model(tokens[:, 9:], past_key_values=cache).logits, whole[:, 9:], **CLOSE)
    assert not torch.allclose(whole, make("dilkit")(tokens).logits, **CLOSE)


@each_model
def test_arguments_of_other_versions_of_transformers(make: Any) -> None:
    """A KV cache counts under any of its names; an unknown argument is refused."""
    layer = next(x for x in make("dilkit").modules() if type(x).__name__.endswith("Attention"))
    first, rows = (dict(residual=0, alibi=None) if make is bloom else dict(position_bias=None)), torch.randn(1, 12, 8 * HEADS)

    def attended(start: int, stop: int, **options: Any) -> Tensor:
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
def test_what_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="output_attentions"):
        make("dilkit")(sequences((12,))[0][None], output_attentions=True)
    with pytest.raises(ValueError, match="attention_mask of MptAttention has padding between tokens"):
        mpt("dilkit")(**batch("between"))


@each_model
def test_blocks_make_checkpoints_of_activations(make: Any) -> None:
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # of torch, at Bloom's own activation
@each_model
@torch.no_grad()
def test_one_graph(make: Any) -> None:
    tokens, model = sequences((12,))[0][None], make("dilkit")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(tokens, use_cache=False).logits, model(tokens).logits, **CLOSE)


@each_model
def test_models_of_eager_attention_stay_so(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sequences((12,))[0][None]
    before = make("eager")(tokens).logits
    make("dilkit")
    monkeypatch.setattr("dilkit.integrations.transformers.biases.alibi._attended", None)
    assert torch.equal(make("eager")(tokens).logits, before)
