"""Modules in the place of packages that are not installed: they say what they are, and go when they are taken away."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

ORIGIN = "stand-in by dilkit.integrations.gigapath"

_placed: dict[ModuleType, dict[str, ModuleType]] = {}
"""The stand-ins, and what `sys.modules` had under that name before."""


def place(name: str, path: Iterable[str] = (), **content: Any) -> None:
    """Put a package with this content where `name` is imported from; other modules of it are looked for in `path`."""
    module = ModuleType(name, f"A {ORIGIN}.")
    module.__spec__ = ModuleSpec(name, None, origin=ORIGIN, is_package=True)
    module.__path__ = list(path)
    vars(module).update(content)
    _placed[module] = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def is_stand_in(module: ModuleType | None) -> bool:
    """Whether `place` made it."""
    return module in _placed


def take_away() -> None:
    """Undo every `place`; a stand-in goes under whatever name others have put it."""
    for name, module in list(sys.modules.items()):
        if is_stand_in(module):
            del sys.modules[name]
    for before in _placed.values():
        sys.modules.update(before)
    _placed.clear()


def refusing(name: str, why: str) -> Callable[..., NoReturn]:
    """A function that raises RuntimeError, whatever it is called with."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name} is a {ORIGIN}, and computes nothing: {why}")

    return refuse
