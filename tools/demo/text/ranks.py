"""The demo over ranks: each has a part of every window; losses and gradients are added up, and rank 0's clock is everyone's."""

from __future__ import annotations

import os
import platform
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilkit.comm import Comm, copy_from_rank, shard_cuts, sum_over_ranks
from dilkit.comm.agreement import agree_on
from dilkit.tools.demo.text.model import ByteTransformer, ModelConfig
from dilkit.tools.measure.memory import MeasureError, PeakMeter
from dilkit.tools.measure.ranks import gather

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


class Memory:
    """The peak memory of this process from now on; `note` says why it cannot be measured, where it cannot."""

    def __init__(self) -> None:
        self.note = ""
        self._meter: PeakMeter | None = None
        try:
            self._meter = PeakMeter()
        except MeasureError as error:
            self.note = str(error)

    def peak(self) -> int | None:
        """Bytes beyond what was held at first; None where they cannot be measured."""
        return None if self._meter is None else self._meter.peak()


class Ranks:
    """One rank among those that train a model together. Windows are cut where segments begin, as far as that goes.

    `stop`: set on any rank, it ends the training on all of them, after the same step.
    """

    def __init__(
        self, comm: Comm, config: ModelConfig, stop: threading.Event | None = None, memory: Memory | None = None
    ) -> None:
        self.comm, self.config, self.memory = comm, config, memory
        self.stop = stop or threading.Event()
        self.by_rank: list[dict[str, Any]] = []
        self.sent: dict[int, dict[str, int]] = {}
        """Bytes that this rank sends to others in a step on windows of so many bytes: for the attention, for the gradients."""

    def rows(self, seq: int) -> tuple[int, int]:
        """Where this rank's part of a window of `seq` bytes begins and ends."""
        cuts = shard_cuts(seq, self.comm.size, self.config.pattern)
        return cuts[self.comm.rank], cuts[self.comm.rank + 1]

    def part(self, windows: Tensor) -> Tensor:
        """A copy of this rank's bytes of `windows` `(windows, seq + 1)`, and the byte after them: the target of the last."""
        start, stop = self.rows(windows.shape[1] - 1)
        return windows[:, start : stop + 1].clone()

    def share(self, seq: int) -> float:
        """This rank's share of a window, and of the mean over its bytes."""
        start, stop = self.rows(seq)
        return (stop - start) / seq

    def backward(self, model: ByteTransformer, window: Tensor, seq: int) -> float:
        """Bits per byte of a window of `seq` bytes, of which this rank has its part; the gradients of that on all ranks."""
        before = self.comm.sent_bytes
        loss = model.bits_per_byte(window) * self.share(seq)
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

    def agree(self, **facts: str | float | None) -> None:
        """Raise on all ranks if they differ in one of `facts`."""
        agree_on(self.comm, lambda: facts, step="what the ranks train on")

    def gather(self) -> None:
        """Let all ranks know what each of them sends and holds; they all have to ask."""
        if self.memory is None:
            return
        process = f"{platform.node()}:{os.getpid()}"
        own = dict(process=process, sent=self.sent, peak_bytes=self.memory.peak())
        self.by_rank = [dict(rank=rank, **fact) for rank, fact in enumerate(gather(self.comm, own))]

    def to_dict(self) -> dict[str, Any] | None:
        """As plain data; None where no `memory` was given. `by_rank` is empty before `gather`."""
        if self.memory is None:
            return None
        world = dict(world_size=self.comm.size, transport=type(self.comm).__name__, memory_note=self.memory.note)
        return dict(**world, cuts=shard_cuts(self.config.context, self.comm.size, self.config.pattern), by_rank=self.by_rank)
