"""What the demo's model learns: random windows of a text, short ones first. Over ranks, windows are cut where segments begin."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilkit.comm import Comm, copy_from_rank, shard_cuts, sum_over_ranks
from dilkit.tools.demo.text.model import ByteTransformer, ModelConfig
from dilkit.tools.demo.trainer import Task

JUDGED_WINDOWS, JUDGEMENTS = 8, 8
"""Held-out windows, and how often they are judged in the course of a training, besides before it."""
SHORT_WINDOW, SHORT_SHARE = 512, 0.75
"""For this share of the budget windows are short: the model takes many more steps, and learns what is near before what is far."""
_STEP_END = struct.Struct("d?")
_SEEDED = threading.Lock()
"""Ranks that are threads share torch's generator."""


class Alone(Comm):
    """The only rank."""

    def __init__(self) -> None:
        super().__init__(0, 1, timeout=1.0)

    def abort(self, why: BaseException) -> None:
        """There are no other ranks."""

    def _post(self, *_: Any) -> Callable[[], None]:
        return lambda: None


def step_end(comm: Comm, seconds: float, stop: threading.Event) -> tuple[float, bool]:
    """Rank 0's `seconds`, and whether `stop` is set on any rank."""
    records = comm.share(_STEP_END.pack(seconds, stop.is_set()), "end of a step")
    steps = [_STEP_END.unpack(record) for record in records]
    return steps[0][0], any(stopped for _, stopped in steps)


def held_out_windows(text: bytes, context: int) -> Tensor:
    """Windows evenly spread over `text`, `(windows, context + 1)`: as many as fit without overlap, at most 8."""
    data, size = _as_tensor(text), context + 1
    count = min(JUDGED_WINDOWS, len(data) // size)
    starts = [i * (len(data) - size) // max(count - 1, 1) for i in range(count)]
    return torch.stack([data[start : start + size] for start in starts])


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class TextTask(Task):
    """The next byte of `text`, judged on the windows `held_out`. Each rank has its part of every window, and all the same losses.

    `stop`: set on any rank, it ends the training on all of them, after the same step.
    """

    model: ByteTransformer

    def __init__(
        self, text: bytes, held_out: Tensor, config: ModelConfig, seed: int, comm: Comm, stop: threading.Event | None = None
    ) -> None:
        self.comm, self.config, self.stop = comm, config, stop or threading.Event()
        self.short_window = min(SHORT_WINDOW, config.context)
        self.rows(self.short_window)  # raises if there are more ranks than bytes
        with _SEEDED:
            torch.manual_seed(seed)
            self.model = ByteTransformer(config, comm if comm.size > 1 else None)
        copy_from_rank([*self.model.parameters()], comm)
        start, end = self.rows(config.context)
        self.text, self.held_out = _as_tensor(text), held_out[:, start : end + 1].clone()
        self._generator = torch.Generator().manual_seed(seed)

    def rows(self, seq: int) -> tuple[int, int]:
        """Where this rank's part of a window of `seq` bytes begins and ends; the byte after it is the target of its last."""
        cuts = shard_cuts(seq, self.comm.size, self.config.pattern)
        return cuts[self.comm.rank], cuts[self.comm.rank + 1]

    def _bits(self, window: Tensor, seq: int) -> Tensor:
        """This rank's share of the mean bits per byte of a window of `seq` bytes, of which `window` is its part."""
        start, end = self.rows(seq)
        return self.model.bits_per_byte(window) * ((end - start) / seq)

    def backward(self, spent: float) -> tuple[float, int]:
        seq = self.short_window if spent < SHORT_SHARE else self.config.context
        first = int(torch.randint(len(self.text) - seq, (), generator=self._generator))
        start, end = self.rows(seq)
        loss = self._bits(self.text[None, first + start : first + end + 1], seq)
        torch.autograd.backward(loss)
        total = loss.detach()
        sum_over_ranks([total, *(p.grad for p in self.model.parameters() if p.grad is not None)], self.comm)
        return total.item(), seq

    @torch.no_grad()
    def judge(self) -> float:
        bits = torch.zeros((), dtype=torch.float64)
        for window in self.held_out:
            bits += self._bits(window[None], self.config.context).item()
            if self.clock(0.0)[1]:
                raise KeyboardInterrupt
        sum_over_ranks([bits], self.comm)
        return bits.item() / len(self.held_out)

    def clock(self, seconds: float) -> tuple[float, bool]:
        """Rank 0's `seconds`, which schedule the training on all ranks alike; and whether any rank was asked to stop."""
        return step_end(self.comm, seconds, self.stop)
