"""Who computes a problem, and why: a pure function from the problem and the known backends to a trace."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dilkit import environment, registry
from dilkit.backend import Backend
from dilkit.problem import Problem
from dilkit.registry import Broken

VERDICTS = ("picked", "able", "refused", "broken")

_override: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("dilkit_backends", default=())


class NoBackendError(ValueError):
    """No backend, or none of those asked for, can compute the problem. The text is the whole trace."""


@dataclass(frozen=True)
class Decision:
    """What became of one backend: its verdict, all its reasons, and what exactly it would run."""

    name: str
    verdict: str
    reasons: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Trace:
    """How the choice for a problem came about, best candidate first. `str(trace)` is the table for people."""

    problem: Problem
    requested: tuple[str, ...]
    decisions: tuple[Decision, ...]

    @property
    def picked(self) -> str | None:
        """The name of the backend that computes the problem; None when none can."""
        return next((d.name for d in self.decisions if d.verdict == "picked"), None)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain data, for JSON."""
        rows = [dict(name=d.name, verdict=d.verdict, reasons=list(d.reasons), detail=d.detail) for d in self.decisions]
        return dict(
            picked=self.picked,
            requested=list(self.requested),
            device=str(self.problem.device),
            problem=str(self.problem),
            backends=rows,
        )

    def __str__(self) -> str:
        asked = f"; asked for: {', '.join(self.requested)}" if self.requested else ""
        lines = [f"{self.problem}", f"on {self.problem.device}{asked}"]
        width = max((len(d.name) for d in self.decisions), default=0)
        for d in self.decisions:
            notes = ([d.detail] if d.detail else []) + list(d.reasons)
            lines.append(f"  {d.name:<{width}}  {d.verdict:<7}  {'; '.join(notes)}".rstrip())
        if not self.decisions:
            lines.append("  no backend is installed: install dilkit itself (pip install -e . in a checkout)")
        return "\n".join(lines)


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Within the block, use the first of `names` that can compute each call; if none can, the call raises.

    Wins over `DILKIT_BACKEND`; a `backend=` argument wins over it. Holds for the thread (or asyncio task) that entered the block,
    and for the backward passes of calls made in it. Code under torch.compile asks when it runs: its backward pass goes by
    the block it runs in. Raises ValueError for a name that is not known.
    """
    token = _override.set(_known(names, "use_backend"))
    try:
        yield
    finally:
        _override.reset(token)


def requested_backends(argument: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """The names asked for: by the argument, else by `use_backend`, else by `DILKIT_BACKEND`; empty for the automatic choice."""
    if argument is not None:
        return _known((argument,) if isinstance(argument, str) else tuple(argument), "backend")
    return _override.get() or _known(environment.backend_names(), environment.BACKEND.name, may_be_empty=True)


def explain(problem: Problem, backend: str | Sequence[str] | None = None) -> Trace:
    """How the choice for `problem` comes about: every backend with its verdict and all its reasons."""
    if not isinstance(problem, Problem):
        raise TypeError(f"problem={problem!r} is a {type(problem).__name__}; a dilkit.Problem is needed")
    return trace(problem, registry.backends(), requested_backends(backend))


def select(problem: Problem, requested: tuple[str, ...] = ()) -> Backend:
    """The backend that computes `problem`. Raises `NoBackendError` (a ValueError) with the whole trace when none can."""
    return _select(problem, requested, registry.generation())


@lru_cache(maxsize=4096)
def _select(problem: Problem, requested: tuple[str, ...], generation: int) -> Backend:
    candidates = registry.backends()
    decided = trace(problem, candidates, requested)
    if decided.picked is None:
        raise NoBackendError(
            f"no {'requested ' if requested else ''}backend can compute this call\n{decided}\nsee `dilkit info --help`"
        )
    chosen = candidates[decided.picked]
    assert isinstance(chosen, Backend)
    return chosen


def trace(problem: Problem, candidates: Mapping[str, Backend | Broken], requested: tuple[str, ...] = ()) -> Trace:
    """Judge every candidate. A pure function: no hardware, no environment, no registry is looked at."""
    order = sorted(candidates.values(), key=lambda c: _rank(c, requested))
    decisions: list[Decision] = []
    for candidate in order:
        decision = _judge(candidate, problem)
        may_pick = not requested or candidate.name in requested
        if decision.verdict == "able" and not may_pick:
            decision = Decision(decision.name, "able", ("not asked for",), decision.detail)
        elif decision.verdict == "able" and all(d.verdict != "picked" for d in decisions):
            decision = Decision(decision.name, "picked", decision.reasons, decision.detail)
        decisions.append(decision)
    return Trace(problem, requested, tuple(sorted(decisions, key=lambda d: VERDICTS.index(d.verdict))))


def _rank(candidate: Backend | Broken, requested: tuple[str, ...]) -> tuple[int, int, str]:
    asked = requested.index(candidate.name) if candidate.name in requested else len(requested)
    return asked, -candidate.priority if isinstance(candidate, Backend) else 0, candidate.name


def _judge(candidate: Backend | Broken, problem: Problem) -> Decision:
    """A backend's own judgement may be foreign code: an exception in it makes the backend broken, not the program."""
    if isinstance(candidate, Broken):
        return Decision(candidate.name, "broken", (f"{candidate.origin}: {candidate.error}",))
    try:
        refusals = tuple(str(refusal) for refusal in candidate.refusals(problem))
        detail = "" if refusals else str(candidate.detail(problem))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        return Decision(candidate.name, "broken", (f"{type(candidate).__qualname__}: {type(error).__name__}: {error}",))
    return Decision(candidate.name, "refused" if refusals else "able", refusals, detail)


def _known(names: tuple[str, ...], source: str, may_be_empty: bool = False) -> tuple[str, ...]:
    if not names and not may_be_empty:
        raise ValueError(f"{source} names no backend; known: {', '.join(registry.list_backends())}")
    known = registry.backends() if names else {}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{source}={name!r} is a {type(name).__name__}; names of backends (str) are needed")
        if name not in known:
            raise ValueError(f"{source}={name!r} is not a known backend; known: {', '.join(registry.list_backends())}")
    return names
