"""`install`: packages that import flash-attn get dilkit's functions."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from dilkit.checks import boolean
from dilkit.integrations.flash_attn import functions, kvcache, padding
from dilkit.integrations.patches import Installation, Patches
from dilkit.integrations.stubs import Stubs, folders, is_there

NAME, VERSION = "flash_attn", "2.8.3"
_MODULES = functions, kvcache
_FUNCTIONS: dict[str, Any] = {name: f for module in _MODULES for name, f in vars(module).items() if name.startswith(NAME)}
_PADDING: dict[str, Any] = {
    name: getattr(padding, name) for name in ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")
}
stubs = Stubs("stand-in by dilkit.integrations.flash_attn")
patches = Patches({}, stubs.take_away)


def install(*, replace: bool = False) -> Installation:
    """Let `import flash_attn` give dilkit's functions, where flash-attn is not installed; a warning says so.

    The modules are `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding`, of version 2.8.3. Other code
    may take flash-attn for installed.

    - `replace`: take the place of an installed flash-attn, too. Functions that were imported before, and its other modules, stay.

    Returns a handle: `uninstall()` undoes the installation, and so does the end of a `with` block; modules stay until the last
    handle is undone. Raises ValueError where flash-attn is installed, unless it is to be replaced.

        >>> import warnings
        >>> from dilkit.integrations.flash_attn import install
        >>> warnings.simplefilter("ignore")
        >>> with install():
        ...     from flash_attn import flash_attn_func
        >>> flash_attn_func.__module__
        'dilkit.integrations.flash_attn.functions'
    """
    boolean("replace", replace)
    if sys.modules.get(NAME) not in stubs:
        if is_there(NAME) and not replace:
            raise ValueError("flash_attn is installed; install(replace=True) takes its place")
        warnings.warn(f"flash_attn {VERSION} is a stand-in from now on, computed by dilkit, until uninstall()", stacklevel=2)
    return stand_in(VERSION)


def stand_in(version: str) -> Installation:
    """Place the modules under the name of a version, or hold those that are placed. Raises ValueError if they have another."""
    there: Any = sys.modules.get(NAME)
    if there in stubs and there.__version__ != version:
        raise ValueError(f"flash_attn={version!r}, but flash_attn={there.__version__!r} is installed; uninstall that first")
    if there not in stubs:
        stubs.place(NAME, folders(NAME), __version__=version, **_FUNCTIONS)
        stubs.place(f"{NAME}.flash_attn_interface", **_FUNCTIONS)
        if version == VERSION:  # earlier ones return other tuples
            stubs.place(f"{NAME}.bert_padding", **_PADDING)
    return Installation(NAME, patches, version=version)
