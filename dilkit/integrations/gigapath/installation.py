"""`install`: GigaPath's `create_model` gives dilkit's encoder, in packages that call it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dilkit.checks import shown
from dilkit.integrations.flash_attn.installation import stand_in, stubs as flash_stubs
from dilkit.integrations.gigapath.longnet_vit import LongNetViT, create_model as described, created
from dilkit.integrations.patches import Installation, Patches
from dilkit.integrations.stubs import Stubs, folders, is_there
from dilkit.selector import names_of

PACKAGE = "gigapath"
MODULE = "gigapath.slide_encoder"
NEEDED = ("timm", "huggingface_hub", "einops", "fairscale")
FLASH = "gigapath.torchscale.component.flash_attention"
"""The module whose `flash_attn_func` is None where flash-attn cannot be used, for which packages look."""
NO_FLASH = "flash-attn is not installed (pip install flash-attn), and dilkit's slide encoder does without"

Creator = Callable[..., Any]
_originals: dict[ModuleType, tuple[Creator, Creator]] = {}
_with_flash: list[ModuleType] = []
_stand_ins: list[Installation] = []
"""Handles of the substitutes for flash-attn."""
_stubs = Stubs("stand-in by dilkit.integrations.gigapath")


def install(*, backend: str | Sequence[str] | None = None, flash_attn: str | None = None) -> Installation:
    """Let `gigapath.slide_encoder.create_model` give dilkit's slide encoder, `dilkit.integrations.gigapath.create_model`.

    Where GigaPath's package is installed, its function is replaced, now or when it is imported. Where it is not, or lacks timm,
    huggingface_hub, einops or fairscale, a module stands in. A function that was imported from the module before stays theirs.

    - `backend`: of the models made, as in `dilkit.dilated_attention`.
    - `flash_attn`: for packages that ask for flash-attn before they make a model: the version, such as "2.5.8" for TRIDENT, of a
      module `flash_attn` that stands in where flash-attn is not installed, with the functions of
      `dilkit.integrations.flash_attn`, until the last installation is undone. An installed flash-attn is left alone.

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
        if not isinstance(flash_attn, str) or not flash_attn:
            raise TypeError(f"flash_attn={shown(flash_attn)} must be the text of a version, such as '2.5.8', or None")
        if sys.modules.get("flash_attn") in flash_stubs or not is_there("flash_attn"):
            _stand_ins.append(stand_in(flash_attn))
    loaded = sys.modules.get(MODULE) is not None  # a stand-in, too
    if not loaded and (PathFinder.find_spec(MODULE, folders(PACKAGE)) is None or not all(map(is_there, NEEDED))):
        _place_gigapath()
    return Installation(PACKAGE, _patches, backend=backend, flash_attn=flash_attn)


def _place_gigapath() -> None:
    _stubs.place(PACKAGE, path=folders(PACKAGE))
    _stubs.place(MODULE, create_model=refusing(f"{MODULE}.create_model", "dilkit's install() is undone"), LongNetViT=LongNetViT)
    for name in ("gigapath.torchscale", "gigapath.torchscale.component"):
        _stubs.place(name)
    _stubs.place(FLASH, flash_attn_func=None)


def _patch(module: ModuleType) -> None:
    original: Creator | None = vars(module).get("create_model")
    if original is None or (module in _originals and original is _originals[module][1]):
        return

    @wraps(described if module in _stubs else original)
    def create_model(
        pretrained: str | Path, model_arch: str, in_chans: int, local_dir: str | Path | None = None, **settings: Any
    ) -> Any:
        handles = _patches.handles[-1:]  # read once: another thread may undo the last installation
        if not handles:
            folder = {} if local_dir is None else {"local_dir": local_dir}
            return original(pretrained, model_arch, in_chans, **folder, **settings)
        return created(pretrained, model_arch, in_chans, local_dir, handles[0].backend, settings)

    _originals[module] = original, create_model
    module.create_model = create_model  # type: ignore[attr-defined]


def _patch_flash(module: ModuleType) -> None:
    if _stand_ins and vars(module).get("flash_attn_func", module) is None:
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
    _stubs.take_away()
    for handle in _stand_ins:
        handle.uninstall()
    _stand_ins.clear()


_patches = Patches({MODULE: _patch, FLASH: _patch_flash}, _restore)


def refusing(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{name} is a {_stubs.origin}, and computes nothing: {why}")

    return refuse
