"""Backend selection: a pure function from a problem, the known backends and an order of them to a trace with all reasons."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dilkit import environment, registry
from dilkit.backend import Backend
from dilkit.checks import check_type, shown, visible
from dilkit.pattern.checks import PatternError
from dilkit.problem import Problem
from dilkit.registry import SEPARATORS, Broken
from dilkit.selection import proof, tuned
from dilkit.selection.preference_table import measured_first, table_preference

State = tuple[tuple[str, ...], tuple[object, ...], int, int]
"""All that a choice of backends depends on besides the problem: `use_backend`, the environment, the backends, the tuned file."""
VERDICTS = ("picked", "able", "refused", "broken")

_override: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("dilkit_backends", default=())


class NoBackendError(ValueError):
    """No backend, or none of those asked for, can compute the problem. A ValueError whose text is the whole trace.

    Example:

        >>> import dilkit
        >>> pattern = dilkit.Pattern([512], [1])
        >>> problem = dilkit.Problem(pattern=pattern, seq=1024, heads=8, head_dim=64, device=dilkit.Device.assume("sm_61"))
        >>> try:
        ...     dilkit.selector.select(problem, ("native",))
        ... except dilkit.NoBackendError as error:
        ...     print("device cuda: runs on cpu" in str(error))
        True
    """


@dataclass(frozen=True)
class Decision:
    """The verdict on one backend."""

    name: str
    """The name of the backend."""
    verdict: str
    """One of `VERDICTS`."""
    reasons: tuple[str, ...] = ()
    """All reasons for the verdict; for the backend that is picked, why it came first."""
    detail: str = ""
    """The backend's words on what it would run (`Backend.detail`)."""


@dataclass(frozen=True)
class Trace:
    """The decisions on all backends for one problem, best candidate first. `str(trace)` is the table for people."""

    problem: Problem
    requested: tuple[str, ...]
    decisions: tuple[Decision, ...]

    @property
    def picked(self) -> str | None:
        """The name of the backend that computes the problem; None when none can."""
        return next((d.name for d in self.decisions if d.verdict == "picked"), None)

    @property
    def why(self) -> str | None:
        """Why the picked backend came before others that can compute the problem; None when none can."""
        return next(("; ".join(d.reasons) for d in self.decisions if d.verdict == "picked"), None)

    def to_dict(self) -> dict[str, Any]:
        """Convert the trace to plain data, for JSON."""
        rows = [dict(name=d.name, verdict=d.verdict, reasons=list(d.reasons), detail=d.detail) for d in self.decisions]
        facts = dict(picked=self.picked, why=self.why, requested=list(self.requested))
        return dict(**facts, device=str(self.problem.device), problem=str(self.problem), backends=rows)

    def __str__(self) -> str:
        requested = f"; asked for: {', '.join(self.requested)}" if self.requested else ""
        lines = [f"{self.problem}", f"on {self.problem.device}{requested}"]
        width = max((len(d.name) for d in self.decisions), default=0)
        for d in self.decisions:
            notes = ([d.detail] if d.detail else []) + list(d.reasons)
            lines.append(f"  {d.name:<{width}}  {d.verdict:<7}  {'; '.join(notes)}".rstrip())
        if not self.decisions:
            lines.append("  no backend is installed: install dilkit itself (pip install -e . in a checkout)")
        return "\n".join(lines)


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Have each call within the block use the first backend of `names` that can compute it, and raise if none can.

    The block has precedence over `DILKIT_BACKEND`, and a `backend=` argument over the block. It holds for the thread (or asyncio
    task) that entered it, and for the backward passes of the calls made in it; compiled code (torch.compile) chooses when it
    runs. Between the `yield`s of a generator it holds for the generator's caller as well. Raises ValueError for a name that is
    not known.

    Example:

        >>> import torch
        >>> from dilkit import Pattern, dilated_attention, use_backend
        >>> q, k, v = torch.randn(3, 1, 64, 2, 8).unbind()
        >>> with use_backend("sdpa", "reference"):
        ...     out = dilated_attention(q, k, v, Pattern([16, 64], [1, 4]))
        >>> torch.equal(out, dilated_attention(q, k, v, Pattern([16, 64], [1, 4]), backend=["sdpa", "reference"]))
        True
    """
    token = _override.set(_check_known(names, "use_backend"))
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that is closed in another context than it was begun in: nothing to restore here
            _override.reset(token)


def names_of(backend: str | Sequence[str]) -> tuple[str, ...]:
    """Return the argument `backend` as names. Raises TypeError or ValueError for anything else; names need not be known."""
    check_type("backend", backend, (str, list, tuple), "a name, a list of names or None is needed")
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    if not names or not all(isinstance(name, str) and name and not any(c in name for c in SEPARATORS) for name in names):
        raise ValueError(f"backend={shown(backend)} must be a name, a list of names, or None for the automatic choice")
    return names


def requested_backends(argument: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the requested names: of the argument, else of `use_backend`, else of `DILKIT_BACKEND`; empty: automatic choice."""
    if argument is not None:
        return _check_known(names_of(argument), "backend")
    if override := _override.get():
        return override
    names = environment.backend_names()
    return _check_known(names, environment.BACKEND.name) if names else ()


def requested_at(moment: State) -> tuple[str, ...]:
    """Return the names requested by `use_backend`, else by `DILKIT_BACKEND`, at the time of `state()`."""
    override, (raw, *_), *_ = moment
    names = () if override else environment.backend_names(raw)
    return _check_known(names, environment.BACKEND.name) if names else override


def explain(problem: Problem, backend: str | Sequence[str] | None = None) -> Trace:
    """Explain the choice of a backend for `problem`: every backend with its verdict and all reasons, as a `Trace`.

    Verdicts are "picked", "able", "refused" and "broken". `backend` requests backends as in `dilated_attention`. Nothing is
    computed, so `problem.device` may be a device that is missing (`Device.assume`). Raises TypeError for anything but a
    `Problem`, ValueError for an unknown name.

    Example:

        >>> from dilkit import Pattern, Problem, explain
        >>> problem = Problem(pattern=Pattern([512, 2048], [1, 4]), seq=4096, heads=8, head_dim=64)
        >>> trace = explain(problem, backend=["cupy_raw", "reference"])  # str(trace) is a table for people
        >>> trace.picked, trace.why
        ('reference', 'asked for')
        >>> {d.name: d.verdict for d in trace.decisions}["cupy_raw"]
        'refused'
    """
    check_type("problem", problem, Problem, "a dilkit.Problem is needed")
    return _decided(problem, requested_backends(backend), prove=False)[0]


def state() -> State:
    """Return a value that changes whenever a choice may: with `use_backend`, the environment, the backends or a tuned file."""
    return _override.get(), environment.choices(), registry.generation, tuned.generation


def select(problem: Problem, requested: tuple[str, ...] = ()) -> Backend:
    """Return the backend that computes `problem`. Raises `NoBackendError` (a ValueError) with the whole trace when none can."""
    return _select(problem, requested, state())


@lru_cache(maxsize=1024)
def _select(problem: Problem, requested: tuple[str, ...], state: State) -> Backend:
    decided, chosen = _decided(problem, requested, prove=True)
    environment.check()
    if chosen is None:
        kind = "requested backend" if requested else "backend"
        raise NoBackendError(f"no {kind} can compute this call\n{decided}\nsee `dilkit info --help`")
    if problem.device.type == "mps" and not requested:
        warnings.warn(
            f"device mps: {chosen.name} computes it. dilkit has no kernel for mps, and was never run there; the definition in "
            f"plain torch is slow. To say that this is meant, name it: backend={chosen.name!r}",
            stacklevel=2,
        )
    return chosen


def _decided(problem: Problem, requested: tuple[str, ...], prove: bool) -> tuple[Trace, Backend | None]:
    """Return the decisions, and the backend picked; failed proofs make it broken. With `prove`, unknown ones are made."""
    candidates = registry.backends()
    preference = {} if requested else measured_first(tuned.seconds(problem), table_preference(problem))
    while True:
        decided = trace(problem, candidates, requested, preference)
        chosen = candidates.get(decided.picked or "")
        if not isinstance(chosen, Backend):
            return decided, None
        why = proof.failure(chosen, problem, prove)
        if not why:
            return decided, chosen
        candidates[chosen.name] = Broken(chosen.name, f"on {problem.device}", why)


def trace(
    problem: Problem,
    candidates: Mapping[str, Backend | Broken],
    requested: tuple[str, ...] = (),
    preference: Mapping[str, str] = {},
) -> Trace:
    """Decide on all candidates. A pure function: it looks at no hardware, environment, registry or file."""
    decisions: list[Decision] = []
    for candidate in ranked(candidates, requested, preference):
        decision = _judge(candidate, problem)
        may_pick = not requested or candidate.name in requested
        if decision.verdict == "able" and not may_pick:
            decision = replace(decision, reasons=("not asked for",))
        elif decision.verdict == "able" and all(d.verdict != "picked" for d in decisions):
            by_priority = f"by its priority, {candidate.priority}" if isinstance(candidate, Backend) else ""
            why = "asked for" if requested else preference.get(candidate.name) or by_priority
            decision = replace(decision, verdict="picked", reasons=(why,))
        decisions.append(decision)
    return Trace(problem, requested, tuple(sorted(decisions, key=lambda d: VERDICTS.index(d.verdict))))


def ranked(
    candidates: Mapping[str, Backend | Broken], requested: tuple[str, ...], preference: Mapping[str, str]
) -> list[Backend | Broken]:
    """Order the candidates: the requested ones, then by priority, which those that `preference` names share out among them."""
    priorities = {name: c.priority if isinstance(c, Backend) else 0 for name, c in candidates.items()}
    named = [name for name in preference if isinstance(candidates.get(name), Backend)]
    priorities |= zip(named, sorted((priorities[name] for name in named), reverse=True), strict=True)

    def rank(name: str) -> tuple[int, int, int, str]:
        return _index_or_end(name, requested), -priorities[name], _index_or_end(name, named), name

    return [candidates[name] for name in sorted(candidates, key=rank)]


def _index_or_end(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _judge(candidate: Backend | Broken, problem: Problem) -> Decision:
    """Judge one candidate: an exception of its code makes it broken, that of a malformed variable or pattern is raised."""
    if isinstance(candidate, Broken):
        return Decision(candidate.name, "broken", (f"{candidate.origin}: {candidate.error}",))
    try:
        refusals = tuple(visible(str(refusal)) for refusal in candidate.refusals(problem))
        detail = "" if refusals else visible(str(candidate.detail(problem)))
    except (KeyboardInterrupt, GeneratorExit, PatternError, environment.VariableError):
        raise
    except BaseException as error:
        return Decision(candidate.name, "broken", (visible(f"{type(candidate).__qualname__}: {type(error).__name__}: {error}"),))
    return Decision(candidate.name, "refused" if refusals else "able", refusals, detail)


def _check_known(names: tuple[str, ...], source: str) -> tuple[str, ...]:
    if not names:
        raise ValueError(f"{source} names no backend; known: {', '.join(registry.list_backends())}")
    known = registry.backends()
    for name in names:
        check_type(source, name, str, "names of backends (str) are needed")
        if name not in known:
            raise ValueError(f"{source}={shown(name)} is not a known backend; known: {', '.join(registry.list_backends())}")
    return names
