"""Keywords of other libraries: where a function lacks one, its error names the way; its signature stays as it is written."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

import dilkit
from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern, comm
from dilkit.keywords import WAYS, refusing

PATTERN = Pattern([4], [1])
ROWS = torch.zeros(1, 8, 2, 4)
CALLS = {
    "dilated_attention": lambda **given: dilkit.dilated_attention(ROWS, ROWS, ROWS, PATTERN, **given),
    "dilated_attention_varlen": lambda **given: dilkit.dilated_attention_varlen(ROWS[0], ROWS[0], ROWS[0], PATTERN, **given),
    "dilated_attention_with_kvcache": lambda **given: dilkit.dilated_attention_with_kvcache(ROWS, ROWS, ROWS, PATTERN, **given),
    "ordered_dilated_attention": lambda **given: dilkit.ordered_dilated_attention(ROWS, ROWS, ROWS, PATTERN, **given),
    "ring_dilated_attention": lambda **given: comm.ring_dilated_attention(ROWS, ROWS, ROWS, PATTERN, **given),
    "ring_dilated_attention_varlen": lambda **given: comm.ring_dilated_attention_varlen(ROWS, ROWS, ROWS, PATTERN, **given),
    "DilatedCache.attend": lambda **given: DilatedCache(PATTERN, 2).attend(ROWS, ROWS, ROWS, **given),
    "DilatedAttention": lambda **given: DilatedAttention(PATTERN, **given),
    "DilatedAttention.forward": lambda **given: DilatedAttention(PATTERN)(ROWS, ROWS, ROWS, **given),
    "MultiheadDilatedAttention": lambda **given: MultiheadDilatedAttention(8, 2, **given),
}
NAMED = {
    ("dilated_attention", "attn_mask"): "the pattern says which token sees which",
    ("dilated_attention", "window_size"): "Pattern.of(SlidingWindow(...))",
    ("dilated_attention", "alibi_slopes"): "write bias=dilkit.Alibi(slopes)",
    ("dilated_attention", "score_mod"): "bias= and softcap= alone",
    ("dilated_attention", "cu_seqlens"): "dilkit.dilated_attention_varlen",
    ("dilated_attention_varlen", "cu_seqlens_q"): "write cu_seqlens=",
    ("ring_dilated_attention", "group"): "TorchComm(group)",
    ("ring_dilated_attention_varlen", "dropout_p"): "nothing is dropped",
    ("DilatedCache.attend", "is_causal"): "always causal",
    ("DilatedAttention", "causal"): "say it in each call, is_causal=",
    ("MultiheadDilatedAttention", "alibi_slopes"): "attention=DilatedAttention(pattern, bias=dilkit.Alibi(slopes))",
    ("dilated_attention", "is_casual"): "did you mean is_causal?",
    ("dilated_attention", "colour"): "it has query, key, value, pattern, is_causal",
}


@pytest.mark.parametrize(("call", "keyword"), NAMED, ids=" ".join)
def test_an_error_names_the_way(call: str, keyword: str) -> None:
    with pytest.raises(TypeError) as raised:
        CALLS[call](**{keyword: None})
    assert str(raised.value).startswith(f"{call} takes no {keyword}=: ")
    assert NAMED[call, keyword] in str(raised.value)


@pytest.mark.parametrize("keyword", WAYS)
def test_each_keyword_is_refused_in_words_or_is_an_argument(keyword: str) -> None:
    for name, call in CALLS.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**{keyword: object()})
        assert "unexpected keyword" not in str(raised.value), name


def test_signatures_and_modules_are_as_written() -> None:
    assert list(inspect.signature(dilkit.dilated_attention).parameters)[:5] == ["query", "key", "value", "pattern", "is_causal"]
    assert dilkit.dilated_attention.__name__ == "dilated_attention"
    assert "pattern" in inspect.signature(DilatedAttention).parameters
    assert pickle.loads(pickle.dumps(dilkit.dilated_attention)) is dilkit.dilated_attention


def test_other_errors_pass_unchanged() -> None:
    @refusing
    def broken(*, given: int = 0) -> None:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        broken(given=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        dilkit.dilated_attention(ROWS, ROWS, ROWS)  # type: ignore[call-arg]
