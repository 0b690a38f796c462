"""Names of a package that are loaded at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str], modules: Mapping[str, str] = {}
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package: for the `names` in each of its modules, and for `modules` themselves."""
    homes = {name: home for home, listed in names.items() for name in listed.split()}

    def load(name: str) -> Any:
        home = homes.get(name) or modules.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home}")
        if name in modules:
            return module
        setattr(sys.modules[package], name, getattr(module, name))
        return getattr(module, name)

    return load, lambda: sorted({*vars(sys.modules[package]), *homes, *modules})
