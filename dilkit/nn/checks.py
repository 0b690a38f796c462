"""Checks of the arguments of the torch modules, with the reason for each option that is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dilkit.checks import integer, shown
from dilkit.op.arguments import BOOL_MASK

_WHY_NOT = {
    "add_bias_kv": "a learned key and value would belong to no position; append a token to the sequence instead",
    "add_zero_attn": "a zero key would belong to no position; append a token to the sequence instead",
    "batch_first": "tensors are (batch, seq, embed_dim); transpose the first two dimensions before and after",
    "need_weights": "attention weights are never held in memory; Pattern.count and dilkit.oracle give them for small problems",
}


def accept_only(name: str, given: Any, only: Any) -> None:
    """Raise ValueError with the reason unless option `name` is `only`."""
    if given is only or (isinstance(given, (bool, int, float)) and given == only):
        return
    what = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
    raise ValueError(f"{name}={what} is not supported, only {name}={only!r}: {_WHY_NOT[name]}")


def even_heads(dim: int, num_heads: int) -> int:
    """Return the dimensions of each head. Raises TypeError or ValueError unless `num_heads` share `dim` evenly."""
    integer("dim", dim, at_least=1)
    if dim % integer("num_heads", num_heads, at_least=1):
        raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}; each head needs equally many dimensions")
    return dim // num_heads


def check_factory(device: Any, dtype: Any) -> None:
    """Raise TypeError or ValueError unless parameters can be made on `device` and of `dtype`; None is torch's default."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={shown(dtype)} is no floating-point torch.dtype; one such as torch.float32 is needed")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"device={shown(device)} is not known to torch: {error}") from None


def check_rows(weight: Tensor, **inputs: tuple[Tensor, int]) -> None:
    """Raise TypeError or ValueError unless all inputs, `name=(tensor, width)`, have that width and the rows of the first.

    They must have the dtype and device of `weight`, too; under autocast any floating-point dtype.
    """
    first, (reference, _) = next(iter(inputs.items()))
    for name, (x, width) in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
        if x.device != weight.device:
            way = f"move it with .to({str(weight.device)!r})"
            raise ValueError(f"{name} is on {x.device} but the parameters on {weight.device}; {way}")
        if x.dtype != weight.dtype and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
            way = f"make them equal, as with {name}.to({weight.dtype})"
            raise TypeError(f"{name} is {x.dtype} but the parameters {weight.dtype}; {way}")
        if x.dim() not in (2, 3) or x.shape[-1] != width:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch, seq, {width}) or (seq, {width}) is needed")
        if x.shape[:-1] != reference.shape[:-1]:
            shapes = f"{tuple(x.shape)} and {first} {tuple(reference.shape)}"
            raise ValueError(
                f"{name} has shape {shapes}; batch and length must be equal (pad the shorter, with a key_padding_mask)"
            )


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True if `module` computes what `kind` does: no subclass, parametrization, hook or `forward` of its own changes that."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return type(module) is kind and not any(hooks) and "forward" not in vars(module)


def check_plain(name: str, module: nn.Module, kind: type[nn.Module], way: str) -> None:
    """Raise ValueError, which ends with the way out, unless `is_plain`: the call would leave out what changes the module."""
    if not is_plain(module, kind):
        what = "with hooks or a forward of its own" if type(module) is kind else f"and no {kind.__name__}"
        raise ValueError(f"{name} is a {type(module).__name__} {what}, which would be lost; {way}")


def bool_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return `mask` as bool, True = ignored. Raises TypeError or ValueError unless it is bool, or 0 and -inf, for each row."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_padding_mask is a {type(mask).__name__}; a bool torch.Tensor is needed")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"key_padding_mask is {mask.dtype}; {BOOL_MASK}")
    if mask.shape != query.shape[:-1]:
        needed = f"{tuple(query.shape[:-1])}, query's without embed_dim, is needed"
        raise ValueError(f"key_padding_mask has shape {tuple(mask.shape)}; {needed}")
    if mask.dtype == torch.bool:
        return mask
    ignored = mask == -torch.inf
    needed = f"key_padding_mask is {mask.dtype} and holds other numbers than 0 and -inf; a bool mask, True = ignored, is needed"
    _require((ignored | (mask == 0)).all(), needed)
    return ignored


def check_causal(mask: object, query: Tensor) -> None:
    """Raise TypeError or ValueError unless `mask` is the causal `(seq, seq)`: True or -inf above the diagonal alone."""
    instead = "the pattern decides which query sees which key; use is_causal, key_padding_mask or another Pattern"
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask is a {type(mask).__name__}; a torch.Tensor, the causal mask, or None is needed: {instead}")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"attn_mask is {mask.dtype}; torch.bool, True = not allowed, or 0 and -inf are needed: {instead}")
    seq = query.shape[-2]
    if mask.shape != (seq, seq):
        raise ValueError(f"attn_mask has shape {tuple(mask.shape)}; only the causal mask ({seq}, {seq}) is supported: {instead}")
    later = torch.ones(seq, seq, dtype=torch.bool, device=mask.device).triu(1)
    same = mask == (later if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(later, -torch.inf))
    _require(
        same.all(),
        "attn_mask is not the causal mask, the only one supported: True (not allowed, the opposite of "
        f"F.scaled_dot_product_attention's), or -inf, above the diagonal, False or 0 elsewhere; {instead}",
    )


def _require(holds: Tensor, needed: str) -> None:
    """Raise ValueError unless `holds` is true; elsewhere than on the CPU the device fails later."""
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._are_functorch_transforms_active():
        while torch._C._functorch.is_functorch_wrapped_tensor(holds):
            holds = torch._C._functorch.get_unwrapped(holds).all()  # of all elements of a mapped dimension
    if type(holds) is not Tensor or holds.is_meta:
        return  # no numbers to look at
    if holds.is_cpu and not compiling:
        if not holds:
            raise ValueError(needed)
    else:
        torch._assert_async(holds, needed)
