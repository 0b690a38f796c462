"""Calls that dilated attention does not compute are refused, with the reason and a way out."""

import ast
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers.language_models import PATTERN, llama, result, sequences, transformers
from helpers.project import run

package = transformers()
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sliding_window_overlay  # noqa: E402

from dilkit.integrations.transformers import dilated_cache, register  # noqa: E402
from dilkit.integrations.transformers.attention import attend  # noqa: E402
from dilkit.integrations.transformers.checks import check_options  # noqa: E402
from dilkit.integrations.transformers.masks import tokens_seen  # noqa: E402
from dilkit.integrations.transformers.sequences import TokenMask  # noqa: E402

TOKENS = sequences((12,))[0][None]
ENDS, OTHER_ENDS = torch.tensor([0, 12], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
ONES, PLACES, EMBEDS = torch.ones(1, 12, dtype=torch.int64), torch.arange(12)[None], torch.zeros(1, 12, 32)
CAUSAL = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
Q = torch.randn(1, 4, 12, 8)


@pytest.fixture(autouse=True)
def registered():
    register(PATTERN)


def asked(make=llama, **inputs):
    return lambda: result(make(attn_implementation="dilkit"), input_ids=TOKENS, **inputs)


def packed_as(of_keys: torch.Tensor):
    return asked(cu_seq_lens_q=ENDS, cu_seq_lens_k=of_keys)


def configured(make=llama, **config):
    def call():
        register(None, "dilkit_by_config")
        result(make(attn_implementation="dilkit_by_config", **config), input_ids=TOKENS)

    return call


def cached(kind: str = "DynamicCache", rows: int = 12, grad: bool = False, **inputs):
    def call():
        model = llama(attn_implementation="dilkit")
        sizes = dict(config=model.config, max_cache_len=32) if kind == "StaticCache" else {}
        cache = getattr(package, kind)(**sizes)
        result(model, input_ids=TOKENS, past_key_values=cache)
        with torch.set_grad_enabled(grad):
            result(model, input_ids=TOKENS[:, :rows], past_key_values=cache, **inputs)

    return call


def in_layer(rows: int, mask=None, **options):
    q, k = Q[:, :, :rows], Q[:, :2, :rows]
    return lambda: attend(PATTERN, None, llama().model.layers[0].self_attn, q, k, k, mask, **options)


def own_mask(mask: torch.Tensor, **inputs):
    def call():
        register(None)
        asked(attention_mask=mask[None, None], **inputs)()

    return call


def masked(make_mask, *inputs, own: bool = False, **options):
    def call():
        if own:
            register(None)
        make_mask(llama(attn_implementation="dilkit", sliding_window=4).config, EMBEDS, *inputs, **options)

    return call


def tokens_of(config, embeds: torch.Tensor, **options):
    return tokens_seen(PATTERN, 1, 12, 12, config=config, dtype=torch.bool, **options)


def shaped(*shape: int) -> str:
    return rf"attention_mask has shape {re.escape(str(shape))}; \(batch, 12\), which of the keys are tokens, is needed"


padding, one_pattern = ONES.tril(-1), [{"segment_lengths": [8], "dilation_rates": [1]}]
REFUSED = {
    "a mask": (asked(attention_mask=CAUSAL), "LlamaAttention has a mask of pairs, beside the pattern Pattern"),
    "a mask of a row": (asked(attention_mask=torch.ones(12)), shaped(12)),
    "a mask of zeros": (asked(attention_mask=torch.zeros(12)), shaped(12)),
    "a mask of ones": (asked(attention_mask=torch.ones(1, 12, 12)), shaped(1, 12, 12)),
    "a mask of pairs": (asked(attention_mask=CAUSAL[0].float()), shaped(1, 12, 12)),
    "a mask of too few tokens": (cached(attention_mask=ONES), r"attention_mask has shape \(1, 12\), but 24 tokens"),
    "a mask of all rows": (
        in_layer(6, TokenMask(True, 12, 12)),
        "LlamaAttention has 6 rows and 6 keys, but its mask is for 12 and 12",
    ),
    "gradients": (cached("StaticCache", 1, grad=True), "has neither gradients nor dropout; take a DynamicCache"),
    "weights": (asked(output_attentions=True, past_key_values=dilated_cache()), r"output_attentions=True .* a dilated_cache\(\)"),
    "weights of packed sequences": (
        asked(output_attentions=True, cu_seq_lens_q=ENDS),
        "output_attentions=True of LlamaAttention with packed sequences",
    ),
    "two windows": (
        masked(create_sliding_window_causal_mask, None, None, and_mask_function=sliding_window_overlay(3), own=True),
        "the mask of the model has several windows",
    ),
    "blocks": (
        masked(create_causal_mask, None, None, block_sequence_ids=torch.zeros(1, 12)),
        "asks for the mask blockwise_overlay",
    ),
    "a mask function": (
        masked(create_causal_mask, None, None, or_mask_function=lambda b, h, q, k: q < k),
        "asks for the mask <lambda>, which says what each row sees, and so does",
    ),
    "a mask of many runs": (own_mask(torch.eye(12).bool() | (PLACES % 2 == 0)), "a row sees 6 runs of keys, of up to 4"),
    "a mask that adds": (own_mask(torch.full((12, 12), -1.0)), "adds other numbers than 0 and the lowest to scores"),
    "a mask that learns": (own_mask(torch.zeros(12, 12, requires_grad=True)), "with a gradient; bools or floats without"),
    "a mask of numbers": (own_mask(torch.ones(12, 12).long()), r"is torch.int64 \(1, 1, 12, 12\); bools or floats"),
    "a mask of other keys": (own_mask(torch.ones(12, 11).bool()), r"is torch.bool \(1, 1, 12, 11\); \(batch, 12\), which"),
    "a mask and a cache": (own_mask(CAUSAL[0, 0], past_key_values=dilated_cache()), r"beside a dilated_cache\(\)"),
    "a mask and packing": (own_mask(CAUSAL[0, 0], cu_seq_lens_q=ENDS), "beside cu_seq_lens_q"),
    "an unknown option": (masked(tokens_of, blocks=Q), "asks for a mask with blocks, which dilkit does not know"),
    "packed, cached": (cached(cu_seq_lens_q=ENDS), "packed sequences have no cache"),
    "packed, padded": (asked(cu_seq_lens_q=ENDS, attention_mask=padding), "cu_seq_lens_q and an attention_mask with padding"),
    "more packed keys": (packed_as(OTHER_ENDS), r"cu_seq_lens_q, \(2,\), and cu_seq_lens_k, \(3,\), differ"),
    "other packed keys": (packed_as(ENDS + 1), r"cu_seq_lens_q, \(2,\), and cu_seq_lens_k, \(2,\), differ"),
    "later rows": (in_layer(12, position_ids=PLACES + 12), r"begin at 12.*give all rows of a sequence, or a cache"),
    "no rates": (configured(dilkit={"segment_lengths": [8]}), "has no dilation_rates"),
    "one pattern of two": (configured(dilkit=one_pattern), "are 1 patterns, one a layer, but this layer has the number 1"),
    "no patterns": (partial(register, []), "empty list"),
    "no call": (partial(register, ["dense()", "longformers(8, 2)"]), "'longformers' makes no pattern; .*did you mean longformer"),
    **{
        f"the name {name!r}": (partial(register, PATTERN, name), "must not be empty or contain 'flash'")
        for name in ("flash_dilkit", "sdpa", "me/dilkit", "paged|dilkit", "")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words), torch.no_grad():
        call()


@pytest.mark.parametrize("arguments", [([PATTERN, 3],), ({"segment_lengths": [8]},), (PATTERN, 3)])
def test_what_is_no_pattern_or_name_is_refused(arguments):
    with pytest.raises(TypeError, match=r"a dilkit\.Pattern is needed, its text|name=3 is a int"):
        register(*arguments)


def test_unknown_arguments():
    """MiniMax-M3's layers choose blocks of keys by such arguments."""

    class Choosing(type(llama().model.layers[0].self_attn)):
        def forward(self, q, chosen, **options):
            attention_interface = partial(attend, PATTERN, None)
            return attention_interface(self, q, q, q, None, scaling=1.0, chosen=chosen, **options)[0]

    layer = Choosing(llama(attn_implementation="dilkit").config, 0)
    layer(Q, None, harmless=Q)  # handed through from the call of the model
    with pytest.raises(ValueError, match=r"chosen=a tensor \(1, 4, 12, 8\) of Choosing is an argument that dilkit does not know"):
        layer(Q, Q)


def test_threads_look_arguments_up_one_after_the_other(monkeypatch):
    layers = [type("Layer", (torch.nn.Module,), {"forward": lambda self: None}) for _ in range(4)]
    parse, parsing, most = ast.parse, [], []

    def watched(source):
        parsing.append(source)
        time.sleep(0.01)
        most.append(len(parsing))
        parsing.pop()
        return parse(source)

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(ast, "parse", watched)
        [*pool.map(lambda kind: check_options(kind(), {}, torch.ones(1)), layers)]
    assert most == [1] * 4


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install dilkit\[transformers\]"):
        register(PATTERN)


@pytest.mark.slow
def test_dilkit_does_not_import_it_and_names_are_functions(tmp_path):
    home = "dilkit.integrations.transformers"
    shown = f"'transformers' in sys.modules, callable({home}.register), callable({home}.convert)"
    done = run(sys.executable, "-c", f"import sys, dilkit, {home}.conversion; print({shown})", cwd=tmp_path)
    assert done.stdout.strip() == "False True True", done.stderr


def test_compiled_blocks_of_tokens_that_see_each_other():
    def blocked(embeds, blocks):
        create_causal_mask(config, embeds, None, None, PLACES, block_sequence_ids=blocks)
        return embeds + 1

    config, alone = llama(attn_implementation="dilkit").config, torch.full((1, 12), -1)
    compiled = torch.compile(blocked, backend="eager", fullgraph=True)
    compiled(EMBEDS, alone)
    image = torch.where(PLACES[0] // 3 == 1, 0, alone)
    with pytest.raises(RuntimeError, match="lets tokens see later ones"):
        compiled(EMBEDS, image)


def test_compiled_blocks_behind_a_cache():
    def blocked(embeds, blocks, cache):
        create_causal_mask(config, embeds, None, cache, PLACES[:, -4:], block_sequence_ids=blocks)
        return embeds + 1

    config, blocks = llama(attn_implementation="dilkit").config, torch.full((1, 12), -1)
    before = torch.zeros(1, config.num_key_value_heads, 8, 4)
    cache = package.DynamicCache()
    cache.update(before, before, 0)
    compiled = torch.compile(blocked, backend="eager")
    compiled(EMBEDS[:, -4:], blocks, cache)
    blocks[:, 9:] = 0
    with pytest.raises(RuntimeError, match="lets tokens see later ones"):
        compiled(EMBEDS[:, -4:], blocks, cache)
