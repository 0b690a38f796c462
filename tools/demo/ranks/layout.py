"""How the ranks of the demo are laid out: `DATAxSEQUENCE`, replicas by the ranks that share each one's sequence."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from dilkit import environment

MOST_STARTED = 64
"""Processes that are started on this machine: each holds torch, a few hundred megabytes."""


@dataclass(frozen=True)
class Layout:
    """`data` replicas, each with sequences of its own, that are cut over `sequence` ranks each."""

    data: int
    sequence: int

    def __post_init__(self) -> None:
        if min(self.data, self.sequence) < 1:
            raise ValueError(f"{self.data} replicas of {self.sequence} ranks; one at least is needed of each")

    def __str__(self) -> str:
        return f"{self.data}x{self.sequence}"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.data * self.sequence


def layout(text: str) -> Layout:
    """An argument type: `DATAxSEQUENCE`, as 2x2."""
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text.strip(), re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not DATAxSEQUENCE, two whole numbers of 1 or more, as 2x2")
    return Layout(int(found[1]), int(found[2]))


def check_context(ranks: Layout, context: int) -> None:
    """Raise ValueError where a sequence has fewer bytes than ranks."""
    if ranks.sequence > context:
        raise ValueError(
            f"--ranks: {ranks} cuts a context of {context:,} bytes over {ranks.sequence:,} ranks, and each needs one at least; "
            "use fewer ranks, or a larger --context"
        )


def are_launched(ranks: Layout) -> bool:
    """Whether torchrun started this process as one of the ranks; False where they are to be started.

    Raises ValueError where a launcher started others, or where they are too many to be started here.
    """
    started = environment.launch()
    if started is not None and started.launcher == "torchrun":
        if started.size != ranks.size:
            raise ValueError(
                f"--ranks: {ranks} is {ranks.size:,} ranks, but torchrun started {started.size:,}; run torchrun "
                f"--nproc-per-node {ranks.size}, or start dilkit alone: it starts the ranks itself"
            )
        return True
    if started is not None and started.size > 1:
        raise ValueError(f"--ranks: FSDP2 needs torch.distributed, but {started.launcher} started this; use torchrun, or neither")
    if ranks.size > MOST_STARTED:
        raise ValueError(
            f"--ranks: {ranks} is {ranks.size:,} processes, and at most {MOST_STARTED} are started on one machine; use fewer, or "
            "torchrun on several machines"
        )
    return False
