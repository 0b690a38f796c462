"""The registry of backends: those that packages declare as entry points, and those that this process registered."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from dilkit.backend import Backend, Limits
from dilkit.checks import boolean, visible

GROUP = "dilkit.backends"
SEPARATORS = (",", ";")
"""Characters that no backend's name may hold: lists of names are written with them."""
LOADING_DEPTH = 200
"""Frames that have to be free where backends are loaded: one that broke for want of them would stay broken."""


@dataclass(frozen=True)
class Broken:
    """A declared backend that could not be loaded: where it came from, and what it raised."""

    name: str
    origin: str
    error: str


_lock = threading.RLock()
# A fork waits for a thread that loads backends: its child would wait for that thread for ever, or see half of them.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_declared: dict[str, Backend | Broken] | None = None
_registered: dict[str, Backend] = {}
generation = 0
"""A number that changes whenever the set of backends does."""


def backends() -> dict[str, Backend | Broken]:
    """Return every known backend by name, broken ones included. Entry points are loaded once, at the first call."""
    with _lock:
        return {**_load_declared(), **_registered}


def list_backends() -> tuple[str, ...]:
    """Return the names of all known backends by descending priority, followed by those that could not be loaded.

    `dilkit info` and `dilkit.explain` say which of them can compute a problem.

    Example:

        >>> import dilkit
        >>> {"native", "sdpa", "reference"} <= set(dilkit.list_backends())
        True
    """
    known = backends().values()
    able = sorted((b for b in known if isinstance(b, Backend)), key=lambda b: (-b.priority, b.name))
    return (*(b.name for b in able), *sorted(b.name for b in known if isinstance(b, Broken)))


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Make `backend` known in this process.

    A package declares an entry point in the group `dilkit.backends` instead. Raises TypeError for anything but an instance of
    `Backend` with a name and limits, and ValueError for the name of a backend of another class, unless `replace`.

    Example, a backend that refuses every call (`dilkit.Backend` has one that computes):

        >>> import dilkit
        >>> class Nothing(dilkit.Backend):
        ...     name = "nothing"
        ...     limits = dilkit.Limits(devices=frozenset())
        ...     def forward(self, inputs, problem):
        ...         raise NotImplementedError
        >>> dilkit.register_backend(Nothing())
        >>> "nothing" in dilkit.list_backends()
        True
        >>> dilkit.unregister_backend("nothing")
    """
    global generation
    if problem := _malformed(backend):
        raise TypeError(f"backend={backend!r}: {problem}")
    boolean("replace", replace)
    with _lock:
        known = backends().get(backend.name)
        if isinstance(known, Backend) and not replace and _class_of(known) != _class_of(backend):
            way = "give yours another name, or replace=True to use it instead"
            raise ValueError(f"backend={backend!r}: the name {backend.name!r} is that of {_class_of(known)}; {way}")
        _registered[backend.name] = backend
        generation += 1


def unregister_backend(name: str) -> None:
    """Remove a backend that `register_backend` made known; a declared backend of that name is then used again.

    Raises ValueError for a name that was not registered in this process.

    Example, the reference backend replaced for a while by one of another priority:

        >>> import dilkit
        >>> from dilkit.backends.reference import Reference
        >>> class Preferred(Reference):
        ...     priority = 100
        >>> dilkit.register_backend(Preferred(), replace=True)
        >>> dilkit.list_backends()[0]
        'reference'
        >>> dilkit.unregister_backend("reference")
        >>> dilkit.list_backends()[0] == "reference"
        False
    """
    global generation
    with _lock:
        if name not in _registered:
            known = ", ".join(sorted(_registered)) or "none"
            raise ValueError(f"name={name!r} was not registered in this process; registered: {known}")
        del _registered[name]
        generation += 1


def _class_of(backend: Backend) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


def _load_declared() -> dict[str, Backend | Broken]:
    global _declared
    if _declared is None:
        _check_depth(LOADING_DEPTH)
        _declared = {}  # set at once: a plug-in may ask for the list while it is being loaded
        try:
            points = entry_points(group=GROUP)
            for point in sorted(points, key=lambda x: (not x.value.startswith("dilkit."), x.name, x.value)):  # ours first
                _add(_load(point), _declared)
        except BaseException:
            _declared = None  # interrupted: half a list must not stay
            raise
    return _declared


def _check_depth(frames: int) -> None:
    if frames:
        _check_depth(frames - 1)


def _load(point: EntryPoint) -> Backend | Broken:
    """Load a plug-in, which is foreign code: whatever it raises, SystemExit included, becomes a `Broken`."""
    try:
        named = point.load()
        if isinstance(named, ModuleType):
            raise TypeError(f"it names a module; name the class in it, as {point.value}:NAME")
        backend = named()
        problem = _malformed(backend)
        if not problem and backend.name != point.name:
            problem = f"the entry point is called {point.name!r} but the backend {backend.name!r}"
    except (KeyboardInterrupt, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        problem = visible(f"{type(error).__name__}: {error}")
    return Broken(point.name, point.value, problem) if problem else backend


def _add(backend: Backend | Broken, known: dict[str, Backend | Broken]) -> None:
    if backend.name in known:
        origin = backend.origin if isinstance(backend, Broken) else type(backend).__module__
        error = f"the name {backend.name!r} is already taken" + (f"; {backend.error}" if isinstance(backend, Broken) else "")
        backend = Broken(f"{backend.name} ({origin})", origin, error)
    known[backend.name] = backend


def _malformed(backend: object) -> str:
    if isinstance(backend, type):
        return f"it is a class; an instance is needed, as {backend.__name__}()"
    if not isinstance(backend, Backend):
        return f"a {type(backend).__name__} is not an instance of dilkit.backend.Backend"
    if not isinstance(getattr(backend, "name", None), str) or not backend.name:
        return "it has no name"
    if any(c in backend.name for c in SEPARATORS) or backend.name != backend.name.strip() or not backend.name.isprintable():
        return f"its name {backend.name!r} has a comma, a semicolon, outer blanks or what cannot be printed"
    if not isinstance(backend.priority, int):
        return f"its priority {backend.priority!r} is not an integer"
    if not isinstance(backend.requires, tuple):
        return f"its requires {backend.requires!r} is not a tuple of module names"
    if not isinstance(backend.limits, Limits):
        return "its limits are not a dilkit.backend.Limits"
    return "" if callable(backend.forward) else "its forward is no method"
