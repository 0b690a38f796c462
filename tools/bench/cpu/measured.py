"""What the steps of the CPU suite measure, each a row of its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from dilkit.tools.results.record import Case, Entry, Samples

WINDOW, MASKED = "native, window", "torch, masked"


@dataclass(frozen=True, kw_only=True)
class CpuCase(Case):
    """Implementations on one of the configurations. `threads`: None in older files, whose cases ran on all of the result's."""

    config: str
    seq: int
    heads: int = 8
    head_dim: int
    is_causal: bool
    backward: bool
    threads: int | None = None

    @property
    def title(self) -> str:
        """Such as "A, d=64, causal, backward"."""
        return title_of(self.config, self.head_dim, self.is_causal, self.backward)


@dataclass(frozen=True, kw_only=True)
class HeadCase(Case):
    """One head, every token seeing every token, on one thread: the kernel beside torch's attention."""

    seq: int
    head_dim: int
    backward: bool

    @property
    def title(self) -> str:
        """Such as "one head of 4,096, d=48, backward"."""
        return title_of(f"one head of {self.seq:,}", self.head_dim, False, self.backward)


@dataclass(frozen=True, kw_only=True)
class DimCase(Case):
    """Implementations, dtypes or numbers of threads, by name, on configuration A."""

    head_dim: int
    backward: bool = False
    threads: int | None = None
    isa: str | None = None


@dataclass(frozen=True, kw_only=True)
class FewCase(Case):
    """One call of the kernel on `seq` tokens, and of torch's attention; `recorded`: with a graph for a backward pass."""

    seq: int
    recorded: bool

    @property
    def title(self) -> str:
        """Such as "16 tokens, with a graph"."""
        return f"{self.seq:,} tokens{', with a graph' * self.recorded}"


@dataclass(frozen=True, kw_only=True)
class GridCase(Case):
    """Neighborhoods of a grid: the kernel beside itself with a `WINDOW` that shows as many keys, or beside torch, `MASKED`."""

    sides: str
    shape: tuple[int, ...]

    @property
    def grid(self) -> str:
        """Such as "128 x 128"."""
        return " x ".join(map(str, self.shape))

    @property
    def title(self) -> str:
        """Such as "neighborhoods of 13 x 13 on 128 x 128"."""
        return f"neighborhoods of {self.sides} on {self.grid}"


@dataclass(frozen=True, kw_only=True)
class SlideCase(Case):
    """The slide encoder, of `depth` layers, on slides of so many `tiles`."""

    tiles: tuple[int, ...]
    depth: int


@dataclass(frozen=True, kw_only=True)
class IdlePass:
    """The tasks of a pass, and by the number of threads the share of their time in which they have none: `simulated`, from the
    pairs that tasks score, and `measured`, where there are as many cores."""

    backward: bool
    tasks: int
    simulated: dict[str, float]
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Idle:
    """How the work of a call falls to threads."""

    what: str
    passes: tuple[IdlePass, ...]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a forward pass on configuration A holds beyond out and lse; None where `why` they cannot be measured."""

    head_dim: int
    scratch_bytes: int | None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class InnerLoops:
    """In older files: dense attention of the kernel on one thread, beside multiply-adds in registers."""

    head_dim: int
    isa: str
    fma_gflops: float
    tile_gflops: float
    entries: dict[str, Samples]


@dataclass(frozen=True, kw_only=True)
class Million:
    """A forward pass of a million tokens, timed in turns with `a`, that of configuration A; and the bytes of inputs, results and
    scratch. What was not measured has no time; older files have no `a`."""

    seq: int
    entry: Entry
    a: Entry | None = None
    time: Samples | None = None
    gflops: float | None = None
    held_bytes: int | None = None


def title_of(of: str, head_dim: int, is_causal: bool, backward: bool) -> str:
    """Such as "A, d=64, causal, backward"."""
    return f"{of}, d={head_dim}{', causal' * is_causal}{', backward' * backward}"
