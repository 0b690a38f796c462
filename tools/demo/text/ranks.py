"""The ranks of the demo: one that is alone, a model that all of them have in common, and what each of them sends and holds."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dilkit.comm import Comm, copy_from_rank, shard_cuts
from dilkit.tools.demo.text.model import ByteTransformer, ModelConfig
from dilkit.tools.measure.memory import MeasureError, PeakMeter
from dilkit.tools.measure.ranks import gather
from dilkit.tools.results.kinds.demo import RankFacts, Sent, World


class Alone(Comm):
    """The only rank."""

    def __init__(self) -> None:
        super().__init__(0, 1, timeout=1.0)

    def abort(self, why: BaseException) -> None:
        """There are no other ranks."""

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
        self.note, self._meter = "", None
        try:
            self._meter = PeakMeter()
        except MeasureError as error:
            self.note = str(error)

    def peak(self) -> int | None:
        """Bytes beyond what was held at first; None where they cannot be measured."""
        return None if self._meter is None else self._meter.peak()


def world_of(comm: Comm, config: ModelConfig, memory: Memory) -> World:
    """The ranks, before any of them says what it sends and holds."""
    cuts = tuple(shard_cuts(config.context, comm.size, config.pattern))
    name = type(comm).__name__
    return World(world_size=comm.size, transport=name, memory_note=memory.note, cuts=cuts, by_rank=())


def gather_facts(comm: Comm, sent: Mapping[int, Sent], memory: Memory) -> tuple[RankFacts, ...]:
    """What each rank sends and holds; all of them have to call this."""
    process = f"{platform.node()}:{os.getpid()}"
    by_tokens = {str(tokens): bytes_sent for tokens, bytes_sent in sent.items()}
    return tuple(gather(comm, RankFacts(rank=comm.rank, process=process, sent=by_tokens, peak_bytes=memory.peak())))
