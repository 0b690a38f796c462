"""`install`: the classes that are patched, when they are loaded, and the end of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from importlib import metadata
from types import ModuleType
from typing import Any
from weakref import ref

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit.attention import dilated_attention
from dilkit.checks import one_of
from dilkit.compiler import assume_constant_result
from dilkit.device import capturing
from dilkit.integrations.newer import check_class, is_newer
from dilkit.integrations.patches import Installation, Patches
from dilkit.integrations.ranks import over_ranks
from dilkit.pattern import TAILS, Pattern
from dilkit.selector import names_of

MODULES = "*torchscale.component.dilated_attention"
CONFIGURATIONS = "*torchscale.architecture.config"
"""The modules that evaluate a text of segment lengths, in which numpy 2 writes `np.int64(1024)`: there `np` has to be known."""

_originals: dict[type, Callable[..., Any]] = {}
_with_numpy: list[ModuleType] = []
_warned: set[tuple[int, int]] = set()
"""The branches whose results differ from torchscale's, of which the latest installation has warned."""


def install(*, tail: str = "zeros", mask: str = "apply", backend: str | Sequence[str] | None = None) -> Installation:
    """Let dilkit compute torchscale's `DilatedAttention`, of modules that exist and of those made later.

    `forward` of every class `*torchscale.component.dilated_attention.DilatedAttention` is replaced, whatever package carries the
    copy of torchscale, and if it is loaded later, then when it is. Parameters and state dicts are not touched. The modules
    `*torchscale.architecture.config` are given `np`, which under numpy 2 they miss when GigaPath's code makes a model.

    - `tail`: "zeros" attends to padded keys, as torchscale does; "exact" attends to tokens alone (`dilkit.Pattern`).
    - `mask`: "apply" hides the keys of `key_padding_mask`; "ignore" lets it have no effect, as torchscale does.
    - `backend`: as in `dilkit.dilated_attention`.

    Returns a handle: `uninstall()`, or the end of a `with` block, undoes the installation. The latest one that is not undone
    rules. Raises ValueError or TypeError for arguments that do not fit; a patched module does so for `attn_mask`, `rel_pos`,
    attention dropout, xPos with `seq_parallel`, and subclasses that change a part of torchscale's procedure.

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
    _warned.clear()
    return Installation("torchscale", _patches, tail=tail, mask=mask, backend=backend)


def _patch(module: ModuleType) -> None:
    """Replace `forward` of the module's class, unless that has been done. A module that is being loaded may have no class yet."""
    kind = vars(module).get("DilatedAttention")
    if not isinstance(kind, type) or kind in _originals:
        return
    original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]
    package, untested = module.__name__.rpartition(".")[0], _untested_version(module.__name__)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        handles = _patches.handles[-1:]  # read once: another thread may undo the last installation
        if not handles:
            return original(self, *args, **kwargs)
        check_procedure(kind, type(self))
        if untested:
            _check_proven(kind, untested)
        return attend(handles[0], package, self, *args, **kwargs)

    _originals[kind] = original
    kind.forward = forward  # type: ignore[attr-defined]


def _untested_version(module: str) -> str:
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


_patches = Patches({MODULES: _patch, CONFIGURATIONS: _name_numpy}, _restore)


_last_mask: tuple[Callable[[], Tensor | None], int, bool] = (lambda: None, 0, True)


def _hides(mask: Tensor) -> bool:
    """True if `mask`, bool, has a True, or if that cannot be found out or remembered.

    Looking waits for a GPU, and torchscale makes a mask for every call. So a mask there is looked at in the first layer alone,
    and again only after torch has written to it.
    """
    global _last_mask
    if torch.compiler.is_compiling():
        return True
    if mask.device.type == "cpu":
        return _look(mask)
    if mask.is_inference() or capturing(mask.device):
        return True
    last, version, answer = _last_mask
    if last() is not mask or version != mask._version:
        answer = _look(mask)
        _last_mask = ref(mask), mask._version, answer
    return answer


def _look(mask: Tensor) -> bool:
    """True if the mask hides anything. Warns if it hides a whole sequence, as an inverted mask does."""
    hides = bool(mask.any())
    if hides and int(mask.sum(dim=-1).max()) == mask.shape[-1]:
        warnings.warn(
            "key_padding_mask hides every key of a sequence, whose rows see nothing; it is True where there is padding, "
            "~mask if yours says where tokens are",
            stacklevel=2,
        )
    return hides


def pattern_of(module: Any, tail: str) -> Pattern:
    """Return the pattern of torchscale's module: its lengths and ratios in pairs; what has no partner is left out."""
    for name in ("segment_length", "dilated_ratio"):
        if isinstance(values := getattr(module.args, name, None), str) or not values:
            raise ValueError(f"args.{name}={values!r} of {type(module).__name__} is no list; a list of integers is needed")
    pairs = tuple(zip(module.args.segment_length, module.args.dilated_ratio, strict=False))
    return _patterns[_name_of_pattern(pairs, tail)]


PROCEDURE = ("attention_ops", "gathering", "gather_kv", "scattering", "dense_to_sparse", "sparse_to_dense")


def check_procedure(kind: type, own: type) -> None:
    """Raise TypeError for a subclass of the patched class that computes a part of it in its own way."""
    if changed := [name for name in PROCEDURE if getattr(own, name, None) is not getattr(kind, name, None)]:
        raise TypeError(
            f"{own.__name__} has its own {', '.join(changed)}, which dilkit does not call; give it its own forward, which "
            "install() leaves alone"
        )


_patterns: dict[str, Pattern] = {}


@assume_constant_result
def _name_of_pattern(pairs: tuple[tuple[int, int], ...], tail: str) -> str:
    name = f"{tail} {pairs}"
    if name not in _patterns:
        lengths, ratios = zip(*pairs, strict=True)
        _patterns[name] = Pattern(lengths, ratios, offset="block", tail=tail)
    return name


def attend(
    options: Installation,
    package: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    incremental_state: dict[str, Tensor] | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rel_pos: Tensor | None = None,
    is_first_step: bool = False,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """Compute `forward` of `module`, of a class in `package`; `incremental_state` holds keys and values of earlier rows."""
    _check_supported(module, attn_mask, rel_pos)
    if is_first_step and incremental_state:
        held = {name: tuple(rows.shape) for name, rows in incremental_state.items()}
        raise ValueError(f"is_first_step is given with an incremental_state that holds {held}; give a new one, or leave it out")
    rows = module.q_proj(query), module.k_proj(key), module.v_proj(value)
    q, k, v = (x.view(*x.shape[:2], module.num_heads, module.head_dim) for x in rows)
    if incremental_state is not None:
        k, v = (_appended(incremental_state, name, x) for name, x in (("prev_key", k), ("prev_value", v)))
    before = k.shape[1] - q.shape[1]
    if k.shape[1] != v.shape[1] or (before and incremental_state is None):
        raise ValueError(
            f"query has {q.shape[1]} rows, key {k.shape[1]} and value {v.shape[1]}; dilated attention is within one sequence"
        )
    if module.xpos is not None:
        q, k = _rotated(module, q, before, False).type_as(v), _rotated(module, k, 0, True).type_as(v)
    q = F.pad(q, (0, 0, 0, 0, before, 0)) if before else q  # rows that were decoded before; their results are not needed again
    group = _group(module, package)
    refused = dict(incremental_state=incremental_state, xPos=module.xpos)  # xPos would count from each rank's first row
    if group is not None and (given := [name for name, value in refused.items() if value is not None]):
        raise ValueError(f"{' and '.join(given)} is given with seq_parallel: run it on one rank, without seq_parallel")
    mask = None if key_padding_mask is None else key_padding_mask.to(torch.bool)
    out = _attention(options, pattern_of(module, options.tail), (q, k, v), mask, is_causal, group)
    out = out[:, before:].reshape(query.shape)
    return module.out_proj(out if module.inner_attn_ln is None else module.inner_attn_ln(out)), None


def _check_supported(module: Any, attn_mask: Tensor | None, rel_pos: Tensor | None) -> None:
    if attn_mask is not None:
        raise ValueError("attn_mask is not supported: the segments define which keys a query sees; leave attn_mask out")
    if rel_pos is not None:
        raise ValueError(
            f"rel_pos is given, a tensor {tuple(rel_pos.shape)} of all pairs, which torchscale's DilatedAttention does not take "
            "either: make the model with args.rel_pos_buckets=0. dilkit.MultiheadDilatedAttention has such tables: call it with "
            "score_bias=dilkit.RelativeTable(table, dilkit.t5_buckets())"
        )
    if module.training and module.dropout > 0:
        raise ValueError(
            f"attention dropout is {module.dropout}: torchscale drops weights of each branch by itself, dilkit those of the one "
            "softmax; set attention_dropout=0, or call eval()"
        )


def _appended(state: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
    rows = new.transpose(1, 2)
    if name in state:
        batch, heads, _, head_dim = rows.shape
        held = tuple(state[name].shape)
        if held != (batch, heads, held[2] if len(held) == 4 else -1, head_dim):
            needed = f"(batch, heads, rows, head_dim) = ({batch}, {heads}, rows, {head_dim})"
            raise ValueError(f"incremental_state[{name!r}] has shape {held}; {needed} is needed: is it of other sequences?")
        rows = torch.cat([state[name], rows], dim=2)
    state[name] = rows.contiguous()
    return state[name].transpose(1, 2)


def _rotated(module: Any, x: Tensor, offset: int, downscale: bool) -> Tensor:
    rows = x.transpose(1, 2)
    turned: Tensor = module.xpos(rows.flatten(0, 1), offset=offset, downscale=downscale)
    return turned.view(rows.shape).transpose(1, 2)


def _attention(
    options: Installation,
    pattern: Pattern,
    rows: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    is_causal: bool,
    group: Any,
) -> Tensor:
    mask = None if options.mask == "ignore" else mask
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    _warn_of_difference(pattern, rows[0].shape[1] * ranks)
    call: dict[str, Any] = dict(is_causal=is_causal, backend=options.backend)
    out: Tensor
    if group is not None:
        out = over_ranks().attend(*rows, pattern, _transport(group), key_padding_mask=mask, **call)
    else:
        fits = mask is not None and mask.shape == rows[1].shape[:2]  # what does not is refused there
        mask = mask if mask is None or not fits or _hides(mask) else None
        out = dilated_attention(*rows, pattern, key_padding_mask=mask, **call)  # type: ignore[assignment]
    return out


def _group(module: Any, package: str) -> Any:
    if not getattr(module.args, "seq_parallel", False):
        return None
    group = sys.modules[f"{package}.utils"].get_data_parallel_group()
    return None if group is None or torch.distributed.get_world_size(group) == 1 else group


@lru_cache(maxsize=8)
def _transport(group: Any) -> Any:
    return over_ranks().transport(group)


def _warn_of_difference(pattern: Pattern, seq: int) -> None:
    for branch in pattern.segments:
        w, r = sizes = branch.segment_length, branch.dilation_rate
        if w % r and seq > w and sizes not in _warned:
            _warned.add(sizes)
            warnings.warn(
                f"segment_length={w} is no multiple of dilated_ratio={r}: torchscale itself puts the results of this branch into "
                f"wrong rows from row {w} on, while dilkit computes dilated attention, so results differ from torchscale's",
                stacklevel=4,
            )
