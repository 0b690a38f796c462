"""Substitutes for modules of other packages: placed where they are imported from, and taken away again."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Stubs:
    """The substitutes of one integration; `origin` describes them, in their `__spec__` and `repr`."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._placed: dict[ModuleType, dict[str, ModuleType]] = {}

    def __contains__(self, module: object) -> bool:
        return isinstance(module, ModuleType) and module in self._placed  # others put what cannot be hashed into sys.modules

    def place(self, name: str, path: Iterable[str] = (), **content: Any) -> None:
        """Put a package with this content where `name` is imported from; other modules of it are looked for in `path`."""
        module = ModuleType(name, f"A {self.origin}.")
        module.__spec__ = ModuleSpec(name, None, origin=self.origin, is_package=True)
        module.__path__ = module.__spec__.submodule_search_locations = list(path)
        vars(module).update(content)
        self._placed[module] = {name: sys.modules[name]} if name in sys.modules else {}
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)

    def take_away(self) -> None:
        """Undo every `place`; substitutes are removed under every name that other code has given them."""
        for name, module in list(sys.modules.items()):
            if module in self:
                del sys.modules[name]
        for before in self._placed.values():
            sys.modules.update(before)
        self._placed.clear()


def is_there(name: str) -> bool:
    """True if a module is loaded or can be found."""
    return sys.modules.get(name) is not None or find_spec(name) is not None


def folders(package: str) -> list[str]:
    """Return the folders of a package in which its modules are looked for; none where it is missing."""
    loaded = sys.modules.get(package)
    spec = None if loaded is not None else find_spec(package)
    return list((spec.submodule_search_locations if spec else getattr(loaded, "__path__", None)) or ())
