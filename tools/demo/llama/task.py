"""What the small Llama learns: the next byte of a text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.integrations.transformers.registration import transformers
from dilkit.tools.demo.text.task import held_out_windows
from dilkit.tools.demo.trainer import Task

SIZES = dict(
    vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)


def make_llama(context: int, seed: int) -> Any:
    """A Llama of random weights that reads bytes. Raises ImportError without transformers."""
    package = transformers()
    torch.manual_seed(seed)
    return package.LlamaForCausalLM(package.LlamaConfig(**SIZES, max_position_embeddings=context, use_cache=False))


class NextByte(Task):
    """Random windows of `text`, in an order that `seed` decides, judged on windows of `held_out`."""

    def __init__(self, model: Any, text: bytes, held_out: bytes, context: int, seed: int) -> None:
        self.model, self.context = model, context
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.held_out = held_out_windows(held_out, context)
        self._generator = torch.Generator().manual_seed(seed)

    def bits_per_byte(self, windows: Tensor) -> Tensor:
        """Of windows `(batch, context + 1)`: the mean of what every byte but the first costs."""
        logits = self.model(input_ids=windows[:, :-1].long()).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].long().flatten()) / math.log(2)

    def backward(self, spent: float) -> tuple[float, int]:
        first = int(torch.randint(len(self._text) - self.context, (), generator=self._generator))
        loss = self.bits_per_byte(self._text[None, first : first + self.context + 1])
        torch.autograd.backward(loss)
        return loss.item(), self.context

    @torch.no_grad()
    def judge(self) -> float:
        return self.bits_per_byte(self.held_out).item()
