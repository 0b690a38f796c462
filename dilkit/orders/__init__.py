"""Token orders: in which order the cells of a grid become the tokens of a sequence."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn


def __getattr__(name: str) -> Any:
    if name not in ("_curves", "_generalised_hilbert", "_points"):  # which setup.py does not build on Windows
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        return _NotBuilt(name)


class _NotBuilt:
    """What stands for a compiled module that is not there: the packages can be imported, and its use is refused."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> NoReturn:
        raise ImportError(
            f"token orders need the compiled module dilkit.orders.{self._name}, which this installation was built without, as on "
            "Windows it always is: build dilkit on Linux or macOS, where a C compiler is"
        )


from dilkit.orders.token_order import TokenOrder as TokenOrder  # noqa: E402
from dilkit.orders.token_order import order as order  # noqa: E402
