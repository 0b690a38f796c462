"""Modules of others that are patched while an `install` holds: those that are loaded, and those that are loaded later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import RLock
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

Patch = Callable[[ModuleType], None]


class Installation:
    """The handle that an `install` returns: `uninstall()`, or the end of a `with` block, undoes the installation.

    Its attributes are the `options` of that `install`.

    >>> from dilkit.integrations.torchscale import install
    >>> handle = install(mask="ignore")
    >>> handle.uninstall()
    >>> handle
    <dilkit for torchscale: tail='zeros', mask='ignore', backend=None, not installed>
    >>> handle.mask
    'ignore'
    """

    def __init__(self, package: str, patches: Patches, **options: Any) -> None:
        self._package, self._patches, self._options = package, patches, options
        vars(self).update(options)
        patches.add(self)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def uninstall(self) -> None:
        """Undo this installation; a second time does nothing. With the last one, modules are as they were before the first."""
        self._patches.remove(self)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        state = "installed" if self in self._patches.handles else "not installed"
        return f"<dilkit for {self._package}{options and f': {options}'}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.uninstall()


class Patches(MetaPathFinder):
    """The patches of modules, by patterns of their names (`fnmatch`), and the function that undoes all of them.

    A patch is called for loaded modules when an `install` begins, for others once they are loaded; it may be called more than
    once, and while a module is being loaded.
    """

    def __init__(self, by_name: Mapping[str, Patch], restore: Callable[[], None]) -> None:
        self._by_name, self._restore, self._lock = dict(by_name), restore, RLock()
        self.handles: list[Installation] = []
        """The installations that hold; the last one rules."""

    def add(self, handle: Installation) -> None:
        with self._lock:
            self.handles.append(handle)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            for name, module in list(sys.modules.items()):
                self._patch(name, module)

    def remove(self, handle: Installation) -> None:
        with self._lock:
            if handle in self.handles:
                self.handles.remove(handle)
            if not self.handles:
                self._restore()
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

    def loaded(self, module: ModuleType) -> None:
        with self._lock:
            if self.handles:
                self._patch(module.__name__, module)

    def _patch(self, name: str, module: ModuleType) -> None:
        for pattern, patch in self._by_name.items():
            if fnmatchcase(name, pattern):
                patch(module)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self not in sys.meta_path or not any(fnmatchcase(fullname, pattern) for pattern in self._by_name):
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        finders = (finder for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for finder in finders if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # for once: the module keeps its loader
                execute(module)
                self.loaded(module)

            loader.exec_module = exec_module
        return spec
