"""torchtitan's inner attention: packed tokens, alone and over ranks by rows and by heads. torchtitan itself is not needed."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import launch
from torch.testing import assert_close

from dilkit import Pattern, dilated_attention

pytest.importorskip("torch.distributed.tensor.parallel", reason="this torch is built without torch.distributed")
from dilkit.integrations import torchtitan
from dilkit.integrations.torchtitan import ContextParallelStyle, InnerAttention

PATTERN = Pattern([8, 24], [1, 2])
Q, K, V = torch.randn(44, 4, 8), torch.randn(44, 2, 8), torch.randn(44, 2, 8)


def test_the_examples_do_what_they_say() -> None:
    assert doctest.testmod(torchtitan).failed == 0


def test_packed_tokens_are_sequences_of_their_own() -> None:
    whole = InnerAttention(PATTERN)(Q, K, V, scale=0.3, enable_gqa=True)
    assert_close(whole, dilated_attention(Q[None], K[None], V[None], PATTERN, is_causal=True, scale=0.3)[0])
    packed = InnerAttention(PATTERN)(Q, K, V, attention_masks=SimpleNamespace(cu_seq_q=torch.tensor([0, 20, 44])))
    second = dilated_attention(Q[None, 20:], K[None, 20:], V[None, 20:], PATTERN, is_causal=True)
    assert_close(packed[20:], second[0])


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a mask": (lambda: InnerAttention(PATTERN)(Q, K, V, block_mask=1), ValueError, "block_mask: what sees what"),
    "a mask that is a tensor": (lambda: InnerAttention(PATTERN)(Q, K, V, block_mask=Q), ValueError, "block_mask: what sees what"),
    "no metadata": (lambda: InnerAttention(PATTERN)(Q, K, V, attention_masks=Q), TypeError, "attention_masks is a Tensor"),
    "a batch": (lambda: InnerAttention(PATTERN)(Q[None], K[None], V[None]), ValueError, r"q has shape \(1, 44, 4, 8\)"),
    "no pattern": (lambda: InnerAttention(3), TypeError, "pattern=3 is a int"),  # type: ignore[arg-type]
    "another module": (lambda: ContextParallelStyle()._apply(torch.nn.Linear(1, 1), None), TypeError, "module is a Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.slow
def test_over_ranks(tmp_path: Path, ranks: int, rows: int) -> None:
    job = launch.start("gloo", ranks, tmp_path, "torchtitan_rank.py", str(rows)).finish()
    assert job.code == 0, job
    assert job.text.count("equals one process") == ranks, job
