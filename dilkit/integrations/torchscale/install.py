"""`install`: the classes that are patched, when they are loaded, and the end of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import metadata
from types import ModuleType
from typing import Any, cast

import numpy

from dilkit.checks import one_of
from dilkit.compiler import assume_constant_result
from dilkit.integrations.newer import check_class, is_newer
from dilkit.integrations.patches import Handle, Patches
from dilkit.integrations.torchscale.forward import Choices, attend, check_procedure
from dilkit.pattern import TAILS
from dilkit.selector import names_of

MODULES = "*torchscale.component.dilated_attention"
"""The modules whose class `DilatedAttention` is patched, in whatever package a copy of torchscale lies."""
CONFIGURATIONS = "*torchscale.architecture.config"
"""The modules that evaluate a text of segment lengths, in which numpy 2 writes `np.int64(1024)`: there `np` has to be known."""

_originals: dict[type, Callable[..., Any]] = {}
_with_numpy: list[ModuleType] = []


class Installation(Handle):
    """The handle that `install` returns: `uninstall()`, or the end of a `with` block, undoes the installation.

    >>> from dilkit.integrations.torchscale import install
    >>> handle = install(mask="ignore")
    >>> handle.uninstall()
    >>> handle
    <dilkit for torchscale: tail='zeros', mask='ignore', backend=None, not installed>
    """

    def __init__(self, options: Choices) -> None:
        self.options = options

    def __repr__(self) -> str:
        options = self.options
        return f"<dilkit for torchscale: tail={options.tail!r}, mask={options.mask!r}, backend={options.backend!r}, {self.state}>"


def install(*, tail: str = "zeros", mask: str = "apply", backend: str | Sequence[str] | None = None) -> Installation:
    """Let dilkit compute torchscale's `DilatedAttention`, of modules that exist and of those made later.

    `forward` of every class `*torchscale.component.dilated_attention.DilatedAttention` is replaced, whatever package carries the
    copy of torchscale, and if it is loaded later, then when it is. Parameters and state dicts are not touched. The modules
    `*torchscale.architecture.config` are given `np`, which under numpy 2 they miss when GigaPath's code makes a model.

    - `tail`: "zeros" attends to padded keys, as torchscale does; "exact" attends to tokens alone (`dilkit.Pattern`).
    - `mask`: "apply" hides the keys of `key_padding_mask`; "ignore" lets it have no effect, as torchscale does.
    - `backend`: as in `dilkit.dilated_attention`.

    Returns a handle: `uninstall()` undoes the installation, and so does the end of a `with` block. The latest installation that
    is not undone rules. Raises ValueError or TypeError for arguments that do not fit; a call of a patched module does
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
    handle = Installation(Choices(tail, mask, backend))
    handle.patches.add(handle)
    return handle


def _patch(module: ModuleType) -> None:
    """Replace `forward` of the module's class, unless that has been done. A module that is being loaded may have no class yet."""
    kind = vars(module).get("DilatedAttention")
    if not isinstance(kind, type) or kind in _originals:
        return
    original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    package, untested = module.__name__.rpartition(".")[0], _untested_version(module.__name__)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        handles = Installation.patches.handles[-1:]
        if not handles:
            return original(self, *args, **kwargs)
        check_procedure(kind, type(self))
        if untested:
            _check_proven(kind, untested)
        return attend(cast(Installation, handles[0]).options, package, self, *args, **kwargs)

    _originals[kind] = original
    kind.forward = forward  # type: ignore[attr-defined]


def _untested_version(module: str) -> str:
    """Return torchscale's version if it is newer than those tested; a copy in another package has none."""
    try:
        version = metadata.version("torchscale") if module.startswith("torchscale.") else ""
    except metadata.PackageNotFoundError:
        return ""
    return version if version and is_newer("torchscale", version) else ""


@assume_constant_result
def _check_proven(kind: type, version: str) -> None:
    check_class("torchscale", version, kind, "dilkit.integrations.torchscale.proving")


def _name_numpy(module: ModuleType) -> None:
    if not hasattr(module, "np"):
        module.np = numpy  # type: ignore[attr-defined]
        _with_numpy.append(module)


def _restore() -> None:
    for kind, original in _originals.items():
        if getattr(kind.forward, "__wrapped__", None) is original:  # type: ignore[attr-defined]
            kind.forward = original  # type: ignore[attr-defined]
    _originals.clear()
    for module in _with_numpy:
        vars(module).pop("np", None)
    _with_numpy.clear()


Installation.patches = Patches({MODULES: _patch, CONFIGURATIONS: _name_numpy}, _restore)
