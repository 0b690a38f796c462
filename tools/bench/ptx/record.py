"""What of the kernels' PTX has been executed on the CPU: the result of `tests/ptx/run.py` and `tests/ptx/mutations.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dilkit.tools.results.record import Result

Key = tuple[str, str, str, bool]
"""Backend, list, architecture and rounding of trials."""


@dataclass(frozen=True, kw_only=True)
class Executed:
    """Trials of one list that one backend has for one kind of GPU: how many there are, and what became of those that were run.

    `rounded`: as tensor cores are measured to round. `source`: a digest of the kernels. `date` of the last run, `seconds` of CPU
    time of all. `passed` and `refused`, as on a GPU or by the emulator, are names of cases, `wrong` too, each with its reason.
    """

    backend: str
    listed: str
    architecture: str
    rounded: bool
    trials: int
    source: str
    date: str = ""
    seconds: float = 0.0
    passed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """What it is, whatever came of it."""
        return self.backend, self.listed, self.architecture, self.rounded

    @property
    def run(self) -> int:
        """How many trials were run to their end."""
        return len(self.passed) + len(self.wrong)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Faults that the PTX of a kernel was given: how many were `caught`, or are `explained` as none; others, by name, that live.

    `source`: a digest of the kernels, `machine` of the emulator and of what shows faults of this kernel.
    """

    kernel: str
    backend: str
    source: str
    machine: str
    date: str
    seconds: float
    caught: int
    explained: int
    lives: tuple[str, ...] = ()

    @property
    def tried(self) -> int:
        """How many in all."""
        return self.caught + self.explained + len(self.lives)


@dataclass(frozen=True, kw_only=True)
class PTXResult(Result):
    """Every list of trials of every backend, and the kernels that were broken."""

    KIND: ClassVar[str] = "ptx"

    executed: tuple[Executed, ...] = ()
    broken: tuple[Broken, ...] = ()
