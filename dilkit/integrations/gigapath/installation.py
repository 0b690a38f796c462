"""`install`: GigaPath's `create_model` gives dilkit's encoder, in packages that call it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from dilkit.checks import shown
from dilkit.integrations.gigapath.longnet_vit import LongNetViT, create_model as described, created
from dilkit.integrations.patches import Handle, Patches
from dilkit.selector import names_of

PACKAGE = "gigapath"
MODULE = "gigapath.slide_encoder"
NEEDED = ("timm", "huggingface_hub", "einops", "fairscale")
FLASH = "gigapath.torchscale.component.flash_attention"
"""The module whose `flash_attn_func` is None where flash-attn cannot be used, for which packages look."""
FLASH_ATTN = "flash_attn"
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
NO_FLASH = "flash-attn is not installed (pip install flash-attn), and dilkit's slide encoder does without"

Creator = Callable[..., Any]
_originals: dict[ModuleType, tuple[Creator, Creator]] = {}
_with_flash: list[ModuleType] = []


class Installation(Handle):
    """The handle that `install` returns: `uninstall()`, or the end of a `with` block, undoes the installation.

    >>> from dilkit.integrations.gigapath import install
    >>> handle = install(backend="reference")
    >>> handle.uninstall()
    >>> handle
    <dilkit for gigapath: backend='reference', flash_attn=None, not installed>
    """

    def __init__(self, backend: str | Sequence[str] | None, flash_attn: str | None) -> None:
        self.backend, self.flash_attn = backend, flash_attn

    def __repr__(self) -> str:
        return f"<dilkit for gigapath: backend={self.backend!r}, flash_attn={self.flash_attn!r}, {self.state}>"


def install(*, backend: str | Sequence[str] | None = None, flash_attn: str | None = None) -> Installation:
    """Let `gigapath.slide_encoder.create_model` give dilkit's slide encoder, `dilkit.integrations.gigapath.create_model`.

    Where GigaPath's package is installed, its function is replaced, now or when it is imported. Where it is not, or lacks timm,
    huggingface_hub, einops or fairscale, a module stands in. A function that was imported from the module before stays theirs.

    - `backend`: of the models made, as in `dilkit.dilated_attention`.
    - `flash_attn`: for packages that ask for flash-attn before they make a model: the version, such as "2.5.8" for TRIDENT, of a
      module `flash_attn` that stands in where flash-attn is not installed. Its functions raise RuntimeError, and it stays until
      the last installation is undone. An installed flash-attn is left alone.

    Returns a handle: `uninstall()` undoes the installation, and so does the end of a `with` block. The latest installation that
    is not undone rules. Raises TypeError or ValueError for arguments that do not fit.

        >>> from dilkit.integrations.gigapath import install
        >>> with install():
        ...     from gigapath.slide_encoder import create_model
        ...     model = create_model("", "gigapath_slide_enc12l384d", 384, global_pool=True)
        >>> type(model)
        <class 'dilkit.integrations.gigapath.longnet_vit.LongNetViT'>
    """
    if backend is not None:
        names_of(backend)  # raises for what are no names
    if flash_attn is not None:
        _check_version(flash_attn)
    handle = Installation(backend, flash_attn)
    loaded = sys.modules.get(MODULE) is not None  # a stand-in, too
    if not loaded and (PathFinder.find_spec(MODULE, _folders()) is None or not all(map(_is_there, NEEDED))):
        _place_gigapath()
    if flash_attn is not None and not _is_there(FLASH_ATTN):
        functions: dict[str, Any] = {name: refusing(f"{FLASH_ATTN}.{name}", NO_FLASH) for name in FUNCTIONS}
        place(FLASH_ATTN, __version__=flash_attn, **functions)
        place(f"{FLASH_ATTN}.flash_attn_interface", **functions)
    handle.patches.add(handle)
    return handle


def _check_version(flash_attn: Any) -> None:
    if not isinstance(flash_attn, str) or not flash_attn:
        raise TypeError(f"flash_attn={shown(flash_attn)} must be the text of a version, such as '2.5.8', or None")
    there = sys.modules.get(FLASH_ATTN)
    if is_stand_in(there) and (version := cast(ModuleType, there).__version__) != flash_attn:
        raise ValueError(f"flash_attn={flash_attn!r}, but flash_attn={version!r} is installed; uninstall that first")


def _is_there(name: str) -> bool:
    return sys.modules.get(name) is not None or find_spec(name) is not None


def _folders() -> list[str]:
    loaded = sys.modules.get(PACKAGE)
    spec = None if loaded is not None else find_spec(PACKAGE)
    return list((spec.submodule_search_locations if spec else getattr(loaded, "__path__", None)) or ())


def _place_gigapath() -> None:
    place(PACKAGE, path=_folders())
    place(MODULE, create_model=refusing(f"{MODULE}.create_model", "dilkit's install() is undone"), LongNetViT=LongNetViT)
    for name in ("gigapath.torchscale", "gigapath.torchscale.component"):
        place(name)
    place(FLASH, flash_attn_func=None)


def _patch(module: ModuleType) -> None:
    original: Creator | None = vars(module).get("create_model")
    if original is None or (module in _originals and original is _originals[module][1]):
        return

    @wraps(described if is_stand_in(module) else original)
    def create_model(
        pretrained: str | Path, model_arch: str, in_chans: int, local_dir: str | Path | None = None, **settings: Any
    ) -> Any:
        handles = Installation.patches.handles[-1:]
        if not handles:
            folder = {} if local_dir is None else {"local_dir": local_dir}
            return original(pretrained, model_arch, in_chans, **folder, **settings)
        return created(pretrained, model_arch, in_chans, local_dir, cast(Installation, handles[0]).backend, settings)

    _originals[module] = original, create_model
    module.create_model = create_model  # type: ignore[attr-defined]


def _patch_flash(module: ModuleType) -> None:
    if is_stand_in(sys.modules.get(FLASH_ATTN)) and vars(module).get("flash_attn_func", module) is None:
        module.flash_attn_func = refusing(f"{FLASH}.flash_attn_func", NO_FLASH)  # type: ignore[attr-defined]
        _with_flash.append(module)


def _restore() -> None:
    for module, (original, ours) in _originals.items():
        if vars(module).get("create_model") is ours:
            module.create_model = original  # type: ignore[attr-defined]
    for module in _with_flash:
        module.flash_attn_func = None  # type: ignore[attr-defined]
    _originals.clear()
    _with_flash.clear()
    take_away()


Installation.patches = Patches({MODULE: _patch, FLASH: _patch_flash}, _restore)


ORIGIN = "stand-in by dilkit.integrations.gigapath"

_placed: dict[ModuleType, dict[str, ModuleType]] = {}


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
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name} is a {ORIGIN}, and computes nothing: {why}")

    return refuse
