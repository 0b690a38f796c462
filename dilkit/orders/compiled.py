"""The compiled modules of token orders, or substitutes that refuse their use where they were not built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dilkit.orders import _curves as _curves, _points as _points

_PACKAGE = __name__.rpartition(".")[0]


def __getattr__(name: str) -> Any:
    if name not in ("_curves", "_points"):  # which setup.py does not build on Windows
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{_PACKAGE}.{name}":
            raise
        return _NotBuilt(name)


class _NotBuilt:
    """A substitute for a compiled module that was not built: the packages can be imported, and its use is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> NoReturn:
        raise ImportError(
            f"token orders need the compiled module dilkit.orders.{self._name}, which this installation was built without, as on "
            "Windows it always is: build dilkit on Linux or macOS, where a C compiler is"
        )
