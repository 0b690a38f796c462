"""The demo over ranks: each has a part of every window; losses and gradients are added up, and rank 0's clock is everyone's."""

from __future__ import annotations

import json
import os
import platform
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.comm import Comm, copy_from_rank, shard_cuts, sum_over_ranks
from dilkit.comm.agreement import agree_on
from dilkit.pattern import Pattern
from dilkit.tools.demo_model import ByteTransformer, ModelConfig

_MEETING = struct.Struct("d?")


class Alone(Comm):
    """One rank that nobody else is beside."""

    def __init__(self) -> None:
        super().__init__(0, 1, timeout=1.0)

    def abort(self, why: BaseException) -> None:
        """There is nobody to tell."""

    def _post(self, *_: Any) -> Callable[[], None]:
        return lambda: None


def same_model(config: ModelConfig, comm: Comm) -> ByteTransformer:
    """A model that attends over the ranks; on all of them with the weights that rank 0 draws from torch's generator."""
    if comm.size == 1:
        return ByteTransformer(config)
    with torch.device("cpu" if comm.rank == 0 else "meta"):  # where no numbers are drawn: ranks may share a generator
        model = ByteTransformer(config, comm)
    if comm.rank:
        model.to_empty(device="cpu")
    copy_from_rank([*model.parameters()], comm)
    return model


class Ranks:
    """One rank among those that train a model together. Windows are cut where segments of `pattern` begin, as far as that goes.

    `stop`: set on any rank, it ends the training on all of them, after the same step.
    """

    def __init__(self, comm: Comm, pattern: Pattern, stop: threading.Event | None = None) -> None:
        self.comm, self.pattern, self.stop = comm, pattern, stop or threading.Event()
        self.sent: dict[int, dict[str, int]] = {}
        """Bytes that this rank sends to others in a step on windows of so many bytes: for the attention, for the gradients."""

    def rows(self, seq: int) -> tuple[int, int]:
        """Where this rank's part of a window of `seq` bytes begins and ends."""
        cuts = shard_cuts(seq, self.comm.size, self.pattern)
        return cuts[self.comm.rank], cuts[self.comm.rank + 1]

    def part(self, windows: Tensor) -> Tensor:
        """A copy of this rank's bytes of `windows` `(windows, seq + 1)`, and the byte after them: the target of the last."""
        start, stop = self.rows(windows.shape[1] - 1)
        return windows[:, start : stop + 1].clone()

    def share(self, seq: int) -> float:
        """This rank's share of a window, and of the mean over its bytes."""
        start, stop = self.rows(seq)
        return (stop - start) / seq

    def backward(self, model: nn.Module, loss: Tensor, seq: int) -> float:
        """Gradients of the sum of all ranks' `loss`, on all of them; that sum. `seq`, the window's length, is for the books."""
        before = self.comm.sent_bytes
        loss.backward()
        total, between = loss.detach(), self.comm.sent_bytes
        sum_over_ranks([total, *(p.grad for p in model.parameters())], self.comm)
        self.sent[seq] = dict(attention=between - before, gradients=self.comm.sent_bytes - between)
        return total.item()

    def sum(self, number: float) -> float:
        """The sum over the ranks."""
        total = torch.tensor(number, dtype=torch.float64)
        sum_over_ranks([total], self.comm)
        return total.item()

    def meet(self, seconds: float = 0.0) -> tuple[float, bool]:
        """Rank 0's `seconds`, which schedule the training on all ranks alike; and whether any rank was told to stop."""
        if self.comm.size == 1:
            return seconds, False
        told = self.comm.share(_MEETING.pack(seconds, self.stop.is_set()), "end of a step")
        met = [_MEETING.unpack(record) for record in told]
        return met[0][0], any(stop for _, stop in met)

    def agree(self, **facts: str) -> None:
        """Raise on all ranks if they differ in one of `facts`."""
        if self.comm.size > 1:
            agree_on(self.comm, lambda: dict(facts), step="what the ranks train on")

    def told(self, **own: Any) -> list[dict[str, Any]]:
        """What each rank says of itself, by rank: `own`, plain data, and what it sends in a step."""
        facts = dict(process=f"{platform.node()}:{os.getpid()}", sent=self.sent, **own)
        return [json.loads(record) for record in self.comm.share(json.dumps(facts).encode(), "facts about the ranks")]
