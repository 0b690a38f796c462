"""Which backends exist: those that packages declare as entry points, ours among them, and those registered in this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from dilkit.backend import Backend, Limits

GROUP = "dilkit.backends"


@dataclass(frozen=True)
class Broken:
    """A declared backend that could not be loaded: where it came from, and what it raised."""

    name: str
    origin: str
    error: str


_lock = threading.RLock()
_loaded: dict[str, Backend | Broken] | None = None
_generation = 0


def backends() -> dict[str, Backend | Broken]:
    """Every known backend by name, broken ones included. Entry points are loaded once, at the first call."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = {}
            for point in sorted(entry_points(group=GROUP), key=_ours_first):
                _add(_load(point))
        return dict(_loaded)


def list_backends() -> tuple[str, ...]:
    """The names of all known backends, those that the automatic choice prefers first, broken ones last."""
    known = backends().values()
    able = sorted((b for b in known if isinstance(b, Backend)), key=lambda b: (-b.priority, b.name))
    return (*(b.name for b in able), *sorted(b.name for b in known if isinstance(b, Broken)))


def register_backend(backend: Backend) -> None:
    """Make `backend` known in this process, in place of any earlier one of that name. Packages declare an entry point instead.

    Raises TypeError for anything but a `Backend` instance with a name and limits.
    """
    global _generation
    if problem := _malformed(backend):
        raise TypeError(f"backend={backend!r}: {problem}")
    with _lock:
        backends()
        assert _loaded is not None
        _loaded[backend.name] = backend
        _generation += 1


def unregister_backend(name: str) -> None:
    """Forget what `register_backend` made known; a declared backend of that name comes back."""
    global _loaded, _generation
    with _lock:
        registered = {n: b for n, b in backends().items() if n != name and isinstance(b, Backend)}
        if name not in backends():
            raise ValueError(f"name={name!r} is not a known backend; known: {', '.join(list_backends())}")
        _loaded = None
        _loaded = {**backends(), **registered}
        _generation += 1


def generation() -> int:
    """A number that changes whenever the set of backends does."""
    return _generation


def _ours_first(point: EntryPoint) -> tuple[bool, str, str]:
    return (not point.value.startswith("dilkit."), point.name, point.value)


def _load(point: EntryPoint) -> Backend | Broken:
    """Plug-ins are foreign code: whatever loading one raises, SystemExit included, becomes a value of the report."""
    try:
        made = point.load()()
        problem = _malformed(made)
        if not problem and made.name != point.name:
            problem = f"the entry point is called {point.name!r} but the backend {made.name!r}"
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
    return Broken(point.name, point.value, problem) if problem else made


def _add(backend: Backend | Broken) -> None:
    assert _loaded is not None
    if backend.name in _loaded:
        origin = backend.origin if isinstance(backend, Broken) else type(backend).__module__
        backend = Broken(f"{backend.name} ({origin})", origin, f"the name {backend.name!r} is already taken")
    _loaded[backend.name] = backend


def _malformed(backend: object) -> str:
    """What is wrong with `backend` as a backend; empty when nothing is."""
    if not isinstance(backend, Backend):
        return f"a {type(backend).__name__} is not an instance of dilkit.backend.Backend"
    if not isinstance(getattr(backend, "name", None), str) or not backend.name:
        return "it has no name"
    if "," in backend.name or backend.name != backend.name.strip():
        return f"its name {backend.name!r} has a comma or outer blanks"
    return "" if isinstance(backend.limits, Limits) else "its limits are not a dilkit.backend.Limits"
