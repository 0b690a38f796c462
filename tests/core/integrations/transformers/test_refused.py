"""What dilated attention does not compute is refused, with the reason and a way out."""

from __future__ import annotations

import ast
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from helpers.language_models import PATTERN, SIZES, bert, llama, result, sequences, transformers
from helpers.project import run

from dilkit import Pattern

package = transformers()
from dilkit.integrations.transformers import dilated_cache, register  # noqa: E402
from dilkit.integrations.transformers.checks import check_options  # noqa: E402

TOKENS = sequences((12,))[0][None]


@pytest.fixture(autouse=True)
def registered() -> None:
    register(PATTERN)


def refused(words: str, model: Any, **inputs: Any) -> None:
    with pytest.raises(ValueError, match=words), torch.no_grad():
        result(model, input_ids=TOKENS, **inputs)


def test_capped_scores_in_a_dilated_cache() -> None:
    config = package.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2)
    config._attn_implementation = "dilkit"
    model = package.Gemma2ForCausalLM(config).eval()
    refused("softcap=50.0 with a dilated_cache", model, past_key_values=dilated_cache())


def test_position_biases_and_cross_attention() -> None:
    config = package.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=64, attn_implementation="dilkit")
    refused("BartConfig has cross-attention", package.BartModel(config).eval())


def test_cross_attention_of_a_decoder_without_a_mask() -> None:
    """Its shapes fit where an image has as many places as the text has tokens."""
    layers = dict(cross_attention_layers=[1], rope_parameters=dict(rope_type="default", rope_theta=1e4))
    config = package.models.mllama.MllamaTextConfig(**SIZES, num_key_value_heads=2, **layers, attn_implementation="dilkit")
    model = package.models.mllama.modeling_mllama.MllamaForCausalLM(config).eval()
    refused("MllamaTextCrossAttention is cross-attention, of two sequences", model, cross_attention_states=torch.randn(1, 12, 32))


def test_masks_of_what_sees_what() -> None:
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    refused(
        r"attention_mask of LlamaAttention is torch.bool \(1, 1, 12, 12\); a mask",
        llama(attn_implementation="dilkit"),
        attention_mask=mask,
    )


def test_one_row_against_a_cache_of_fixed_size_with_gradients() -> None:
    model = llama(attn_implementation="dilkit")
    cache = package.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        result(model, input_ids=TOKENS, past_key_values=cache)
    with pytest.raises(ValueError, match="has neither gradients nor dropout; take a DynamicCache"):
        result(model, input_ids=TOKENS[:, :1], past_key_values=cache)


def test_matrices_of_weights() -> None:
    refused("output_attentions", llama(attn_implementation="dilkit"), output_attentions=True)


def test_chunked_attention() -> None:
    from transformers.masking_utils import create_chunked_causal_mask

    config = llama(attn_implementation="dilkit").config
    config.attention_chunk_size = 4
    embeds = torch.zeros(1, 12, 32)
    with pytest.raises(ValueError, match="asks for the mask chunked_overlay"):
        create_chunked_causal_mask(config, embeds, torch.ones(1, 12), None, torch.arange(12)[None])


def test_mask_functions_of_a_model() -> None:
    from transformers.masking_utils import create_causal_mask

    config, embeds = llama(attn_implementation="dilkit").config, torch.zeros(1, 12, 32)
    with pytest.raises(ValueError, match="mask function of the model's own"):
        create_causal_mask(config, embeds, None, None, or_mask_function=lambda b, h, q, k: q < k)


def test_unknown_arguments() -> None:
    """Such as those by which layers of MiniMax-M3 choose blocks of keys, and those of later versions of transformers."""
    from dilkit.integrations.transformers.attention import attend
    from dilkit.integrations.transformers.masks import tokens_seen

    class Choosing(type(llama().model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, q: Any, chosen: Any, **options: Any) -> Any:
            attention_interface = partial(attend, PATTERN, None)
            return attention_interface(self, q, q, q, None, scaling=1.0, chosen=chosen, **options)[0]

    config = llama(attn_implementation="dilkit").config
    layer, q = Choosing(config, 0), torch.randn(1, 4, 12, 8)
    layer(q, None, harmless=q)  # handed through from the call of the model
    with pytest.raises(ValueError, match=r"chosen=a tensor \(1, 4, 12, 8\) of Choosing is an argument that dilkit does not know"):
        layer(q, q)
    with pytest.raises(ValueError, match="asks for a mask with blocks, which dilkit does not know"):
        tokens_seen(PATTERN, 1, 12, 12, config=config, dtype=torch.bool, blocks=q)


def test_threads_look_arguments_up_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [type("Layer", (torch.nn.Module,), {"forward": lambda self: None}) for _ in range(4)]
    parse, parsing, most = ast.parse, [], []

    def watched(source: str) -> ast.Module:
        parsing.append(source)
        time.sleep(0.01)
        most.append(len(parsing))
        parsing.pop()
        return parse(source)

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(ast, "parse", watched)
        [*pool.map(lambda kind: check_options(kind(), {}, torch.ones(1)), layers)]
    assert most == [1] * 4


def test_packed_sequences_with_a_cache() -> None:
    model, ends = llama(attn_implementation="dilkit"), torch.tensor([0, 12], dtype=torch.int32)
    cache = package.DynamicCache()
    with torch.no_grad():
        result(model, input_ids=TOKENS, past_key_values=cache)
    refused("packed sequences have no cache", model, past_key_values=cache, cu_seq_lens_q=ends)


def test_packed_sequences_and_padding() -> None:
    ends, mask = torch.tensor([0, 12], dtype=torch.int32), torch.ones(1, 12, dtype=torch.int64)
    model, other = llama(attn_implementation="dilkit"), torch.tensor([0, 5, 12], dtype=torch.int32)
    refused("cu_seq_lens_q and an attention_mask with padding", model, cu_seq_lens_q=ends, attention_mask=mask.tril(-1))
    refused(r"cu_seq_lens_q, \(2,\), and cu_seq_lens_k, \(3,\), differ", model, cu_seq_lens_q=ends, cu_seq_lens_k=other)
    refused(r"cu_seq_lens_q, \(2,\), and cu_seq_lens_k, \(2,\), differ", model, cu_seq_lens_q=ends, cu_seq_lens_k=ends + 1)


def test_a_part_of_a_sequence_by_its_positions() -> None:
    from dilkit.integrations.transformers.attention import attend

    model, later = llama(attn_implementation="dilkit"), torch.arange(12, 24)[None]
    with torch.no_grad(), pytest.warns(UserWarning, match="position_ids begin at 12, but there are no keys of earlier positions"):
        result(model, input_ids=TOKENS, position_ids=later)
    q, k = torch.randn(1, 4, 12, 8), torch.randn(1, 2, 12, 8)
    with pytest.raises(ValueError, match=r"position_ids begin at 12.*give all rows of a sequence, or a cache"):
        attend(PATTERN, None, model.model.layers[0].self_attn, q, k, k, None, position_ids=later)


def test_a_part_of_the_rows_with_the_mask_of_all() -> None:
    from dilkit.integrations.transformers.attention import attend
    from dilkit.integrations.transformers.token_mask import TokenMask

    layer = llama(attn_implementation="dilkit").model.layers[0].self_attn
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="LlamaAttention has 6 rows and 6 keys, but its mask is for 12 and 12"):
        attend(PATTERN, None, layer, q, k, k, TokenMask(True, 12, 12))


def test_a_mask_of_too_few_tokens() -> None:
    model, cache = llama(attn_implementation="dilkit"), package.DynamicCache()
    with torch.no_grad():
        result(model, input_ids=TOKENS, past_key_values=cache)
    mask = torch.ones(1, 12, dtype=torch.int64)
    refused(r"attention_mask has shape \(1, 12\), but 24 tokens", model, past_key_values=cache, attention_mask=mask)


@pytest.mark.parametrize("shape", [(12,), (1, 12, 12)], ids=str)
def test_a_mask_of_other_than_two_dimensions(shape: tuple[int, ...]) -> None:
    words = rf"attention_mask has shape {re.escape(str(shape))}; \(batch, 12\), which of the keys are tokens, is needed"
    for mask in (torch.ones(shape), torch.ones(shape).tril() if len(shape) > 1 else torch.zeros(shape)):
        refused(words, llama(attn_implementation="dilkit"), attention_mask=mask)


def test_no_pattern() -> None:
    register(None, "dilkit_nothing")
    refused("the configuration of the model has no `dilkit`", bert(attn_implementation="dilkit_nothing"))


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"segment_lengths": [8]}, "has no dilation_rates"),
        ([{"segment_lengths": [8], "dilation_rates": [1]}], "there are 1 patterns, one a layer, but this layer has the number 1"),
    ],
)
def test_configurations_that_do_not_fit(stated: Any, words: str) -> None:
    register(None, "dilkit_by_config")
    refused(words, llama(attn_implementation="dilkit_by_config", dilkit=stated))


@pytest.mark.parametrize("name", ["flash_dilkit", "sdpa", "me/dilkit", "paged|dilkit", ""])
def test_names_that_transformers_reads_meaning_into(name: str) -> None:
    with pytest.raises(ValueError, match="must not be empty or contain 'flash'"):
        register(PATTERN, name)


@pytest.mark.parametrize("pattern", ["dense", [PATTERN, 3], {"segment_lengths": [8]}])
def test_patterns_that_are_none(pattern: Any) -> None:
    with pytest.raises(TypeError, match=r"a dilkit\.Pattern is needed, or a list of them"):
        register(pattern)


def test_an_empty_list_and_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="empty list"):
        register([])
    with pytest.raises(TypeError, match="name=3 is a int"):
        register(Pattern.dense(), 3)  # type: ignore[arg-type]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install dilkit\[transformers\]"):
        register(PATTERN)


@pytest.mark.slow
def test_dilkit_does_not_import_it_and_names_are_functions_whatever_is_imported_first(tmp_path: Any) -> None:
    home = "dilkit.integrations.transformers"
    shown = f"'transformers' in sys.modules, callable({home}.register), callable({home}.convert)"
    done = run(sys.executable, "-c", f"import sys, dilkit, {home}.conversion; print({shown})", cwd=tmp_path)
    assert done.stdout.strip() == "False True True", done.stderr


def test_compiled_blocks_of_tokens_that_see_each_other() -> None:
    from transformers.masking_utils import create_causal_mask

    def masked(embeds: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        create_causal_mask(config, embeds, None, None, torch.arange(12)[None], block_sequence_ids=blocks)
        return embeds + 1

    config, alone = llama(attn_implementation="dilkit").config, torch.full((1, 12), -1)
    compiled = torch.compile(masked, backend="eager", fullgraph=True)
    compiled(torch.zeros(1, 12, 32), alone)
    image = torch.where(torch.arange(12) // 3 == 1, 0, alone)
    with pytest.raises(RuntimeError, match="lets tokens see later ones"):
        compiled(torch.zeros(1, 12, 32), image)
