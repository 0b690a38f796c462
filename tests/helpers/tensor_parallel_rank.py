"""A model of transformers with its heads over ranks: `tensor_parallel_rank.py <launcher> <folder>` on each of some processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.rank import connect, say
from transformers import AutoModelForCausalLM

from dilkit import Pattern, SlidingWindow
from dilkit.integrations.transformers import register


def main(launcher: str, folder: Path) -> None:
    rank = connect(launcher, 60.0).rank
    tokens = torch.arange(40)[None] % 60 + 3
    register(Pattern([4, 16], [1, 2]))
    register(Pattern.of(SlidingWindow(5)), "dilkit_windows")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="dilkit").eval()
        with pytest.raises(ValueError, match=r"LlamaAttention has 2 of the 4 heads of the model.*head_shard"):
            model(tokens)
        split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="dilkit_windows").eval()
        alone = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dilkit_windows").eval()
        torch.testing.assert_close(split(tokens).logits, alone(tokens).logits, atol=2e-5, rtol=2e-5)
    say(f"rank {rank} refused, and computed what is the same for all heads")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
