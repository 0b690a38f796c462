"""Which classes are patched, when, and how that is undone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import RLock
from types import ModuleType, TracebackType
from typing import Any

from dilkit.checks import one_of
from dilkit.integrations.torchscale.forward import Options, attend, check_procedure
from dilkit.pattern import TAILS
from dilkit.selector import names_of

MODULES = "*torchscale.component.dilated_attention"
"""The modules whose class `DilatedAttention` is patched, in whatever package a copy of torchscale lies."""

_lock = RLock()
_installed: list[Installation] = []
_originals: dict[type, Callable[..., Any]] = {}


class Installation:
    """What `install` returns: `uninstall()`, or the end of a `with` block, undoes it.

    >>> from dilkit.integrations.torchscale import install
    >>> handle = install(mask="ignore")
    >>> handle.uninstall()
    >>> handle
    <dilkit for torchscale: tail='zeros', mask='ignore', backend=None, not installed>
    """

    def __init__(self, options: Options) -> None:
        self._options = options

    def uninstall(self) -> None:
        """Undo this installation; a second time does nothing. With the last one, classes are as they were before the first."""
        with _lock:
            if self in _installed:
                _installed.remove(self)
            if not _installed:
                _restore()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        options, state = self._options, "installed" if self in _installed else "not installed"
        return f"<dilkit for torchscale: tail={options.tail!r}, mask={options.mask!r}, backend={options.backend!r}, {state}>"


def install(*, tail: str = "zeros", mask: str = "apply", backend: str | Sequence[str] | None = None) -> Installation:
    """Let dilkit compute torchscale's `DilatedAttention`, of modules that exist and of those made later.

    `forward` of every class `*torchscale.component.dilated_attention.DilatedAttention` is replaced, whatever package carries the
    copy of torchscale, and if it is loaded later, then when it is. Parameters and state dicts are not touched.

    - `tail`: "zeros" attends to padded keys, as torchscale does; "exact" attends to tokens alone (`dilkit.Pattern`).
    - `mask`: "apply" hides the keys of `key_padding_mask`; "ignore" lets it have no effect, as torchscale does.
    - `backend`: as in `dilkit.dilated_attention`.

    Returns a handle: `uninstall()` undoes the installation, and so does the end of a `with` block. Of several installations, the
    latest that is not undone rules. Raises ValueError or TypeError for arguments that do not fit; a call of a patched module does
    so for `attn_mask`, `rel_pos`, attention dropout in training, xPos with `seq_parallel`, an `incremental_state` of other
    sequences, and subclasses that change a part of torchscale's procedure.

        >>> from dilkit.integrations.torchscale import install
        >>> with install(tail="exact") as handle:
        ...     print(handle)
        <dilkit for torchscale: tail='exact', mask='apply', backend=None, installed>
        >>> handle
        <dilkit for torchscale: tail='exact', mask='apply', backend=None, not installed>
    """
    one_of("tail", tail, TAILS)
    one_of("mask", mask, ("apply", "ignore"))
    if backend is not None:
        names_of(backend)  # raises for what are no names
    handle = Installation(Options(tail, mask, backend))
    with _lock:
        _installed.append(handle)
        if _hook not in sys.meta_path:
            sys.meta_path.insert(0, _hook)
        for name, module in list(sys.modules.items()):
            if fnmatchcase(name, MODULES):
                _patch(module)
    return handle


def _patch(module: ModuleType) -> None:
    """Replace `forward` of the module's class, unless that has been done. A module that is being loaded may have no class yet."""
    kind = vars(module).get("DilatedAttention")
    if not isinstance(kind, type) or kind in _originals:
        return
    original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    package = module.__name__.rpartition(".")[0]

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        handles = _installed[-1:]
        if not handles:
            return original(self, *args, **kwargs)
        check_procedure(kind, type(self))
        return attend(handles[0]._options, package, self, *args, **kwargs)

    _originals[kind] = original
    kind.forward = forward  # type: ignore[attr-defined]


def _restore() -> None:
    for kind, original in _originals.items():
        if getattr(kind.forward, "__wrapped__", None) is original:  # type: ignore[attr-defined]
            kind.forward = original  # type: ignore[attr-defined]
    _originals.clear()
    if _hook in sys.meta_path:
        sys.meta_path.remove(_hook)


class _Hook(MetaPathFinder):
    """Finds the modules of `MODULES` as Python does, and has them patched once they are loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fnmatchcase(fullname, MODULES):
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    """`loader`, for once: the module keeps `loader` as its own."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            if _installed:
                _patch(module)


_hook = _Hook()
