"""Who computes a problem, and why: a pure function from the problem, the known backends and an order of them to a trace."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dilkit import environment, registry
from dilkit.backend import Backend
from dilkit.problem import Problem
from dilkit.registry import Broken
from dilkit.selection import tuned
from dilkit.selection.preference import Preference, measured_first
from dilkit.selection.table import table_preference

VERDICTS = ("picked", "able", "refused", "broken")

_override: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("dilkit_backends", default=())


class NoBackendError(ValueError):
    """No backend, or none of those asked for, can compute the problem. The text is the whole trace."""


@dataclass(frozen=True)
class Decision:
    """What became of one backend: its verdict, all its reasons (of the picked one: why it came first), and what it would run."""

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

    @property
    def why(self) -> str | None:
        """Why the backend that is picked came before others that can; None when none can."""
        return next(("; ".join(d.reasons) for d in self.decisions if d.verdict == "picked"), None)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain data, for JSON."""
        rows = [dict(name=d.name, verdict=d.verdict, reasons=list(d.reasons), detail=d.detail) for d in self.decisions]
        return dict(
            picked=self.picked,
            why=self.why,
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
    requested = requested_backends(backend)
    return trace(problem, registry.backends(), requested, preferred(problem, requested))


def preferred(problem: Problem, requested: tuple[str, ...] = ()) -> Preference:
    """The automatic order of backends for `problem`: what was measured on its device, then what the table says.

    None where backends are asked for, which are then tried in the order asked for; no file is read for that.
    """
    if requested:
        return Preference()
    return measured_first(tuned.seconds(problem), table_preference(problem))


def state() -> tuple[object, ...]:
    """A value that changes whenever a choice may: with the set of backends, and with what was measured."""
    return registry.generation(), *tuned.state()


def select(problem: Problem, requested: tuple[str, ...] = ()) -> Backend:
    """The backend that computes `problem`. Raises `NoBackendError` (a ValueError) with the whole trace when none can."""
    return _select(problem, requested, state())


@lru_cache(maxsize=4096)
def _select(problem: Problem, requested: tuple[str, ...], state: tuple[object, ...]) -> Backend:
    candidates = registry.backends()
    decided = trace(problem, candidates, requested, preferred(problem, requested))
    if decided.picked is None:
        raise NoBackendError(
            f"no {'requested ' if requested else ''}backend can compute this call\n{decided}\nsee `dilkit info --help`"
        )
    chosen = candidates[decided.picked]
    assert isinstance(chosen, Backend)
    return chosen


def trace(
    problem: Problem,
    candidates: Mapping[str, Backend | Broken],
    requested: tuple[str, ...] = (),
    preference: Preference = Preference(),  # noqa: B008
) -> Trace:
    """Judge every candidate. A pure function: no hardware, no environment, no registry, no file is looked at."""
    decisions: list[Decision] = []
    for candidate in ranked(candidates, requested, preference):
        decision = _judge(candidate, problem)
        may_pick = not requested or candidate.name in requested
        if decision.verdict == "able" and not may_pick:
            decision = replace(decision, reasons=("not asked for",))
        elif decision.verdict == "able" and all(d.verdict != "picked" for d in decisions):
            decision = replace(decision, verdict="picked", reasons=(_why(candidate, requested, preference),))
        decisions.append(decision)
    return Trace(problem, requested, tuple(sorted(decisions, key=lambda d: VERDICTS.index(d.verdict))))


def ranked(
    candidates: Mapping[str, Backend | Broken], requested: tuple[str, ...], preference: Preference
) -> list[Backend | Broken]:
    """The candidates, best first: those asked for in their order, the others by priority.

    The backends that `preference` names hand their priorities out among themselves, the highest to its first: so one that it
    does not name stays where its own priority puts it.
    """
    priorities = {name: c.priority if isinstance(c, Backend) else 0 for name, c in candidates.items()}
    named = [name for name in preference.order if isinstance(candidates.get(name), Backend)]
    priorities |= zip(named, sorted((priorities[name] for name in named), reverse=True), strict=True)

    def rank(name: str) -> tuple[int, int, int, str]:
        return _place(name, requested), -priorities[name], _place(name, named), name

    return [candidates[name] for name in sorted(candidates, key=rank)]


def _place(name: str, names: Sequence[str]) -> int:
    """Where `name` is in `names`, behind all of them if it is not."""
    return names.index(name) if name in names else len(names)


def _why(candidate: Backend | Broken, requested: tuple[str, ...], preference: Preference) -> str:
    """Why `candidate` came before others that can compute the problem."""
    if requested:
        return "asked for"
    own = f"by its priority, {candidate.priority}" if isinstance(candidate, Backend) else ""
    return preference.why(candidate.name) or own


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
