"""Valid calls as plain data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from fuzz.rounding import within_rounding
from helpers.calls import encode_call
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dilkit import DilatedAttention, Pattern, dilated_attention, dilated_attention_varlen, use_backend
from dilkit.op.operators import forward_op
from dilkit.testing import accuracy, conformance
from dilkit.testing.accuracy import Results
from dilkit.testing.problems import Case
from dilkit.testing.tensors import Tensors, make_tensors


@dataclass(frozen=True, kw_only=True)
class Call:
    case: Case
    layouts: tuple[str, str, str, str] = ("plain",) * 4
    wants: tuple[bool, bool, bool] = (True, True, True)
    backend: str = "native"
    way: str = "function"
    hooks: str = "none"
    through_lse: bool = True
    mask_layout: str = "plain"

    def to_data(self) -> dict[str, Any]:
        return vars(self) | dict(case=vars(self.case) | dict(pattern=json.loads(self.case.pattern.to_json())))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Call:
        made = dict(
            pattern=Pattern.from_json(json.dumps(data["case"]["pattern"])), lengths=tuple(data["case"].get("lengths", ()))
        )
        case = Case(**{**data["case"], **made})
        return cls(**{**data, "case": case, "layouts": tuple(data["layouts"]), "wants": tuple(data["wants"])})


def tensors_of(call: Call) -> Tensors:
    """The tensors of a call, each in its layout; under autocast they are fp32 numbers that its dtype can hold."""
    tensors = make_tensors(call.case)
    inputs = [*tensors.qkv, tensors.dout]
    if "packed" in call.layouts:
        inputs[:3] = torch.cat(inputs[:3], 2).split([x.shape[2] for x in inputs[:3]], 2)
    q, k, v, dout = (LAYOUTS[layout](x) for layout, x in zip(call.layouts, inputs, strict=True))
    mask = None if tensors.mask is None else MASK_LAYOUTS[call.mask_layout](tensors.mask)
    dlse = tensors.dlse if call.through_lse else None
    sink = None if tensors.sink is None else tensors.sink.bfloat16().to(q.dtype)  # which autocast leaves as it is
    return replace(tensors, query=q, key=k, value=v, dout=dout, mask=mask, dlse=dlse, sink=sink)


def _sliced(x: Tensor) -> Tensor:
    batch, seq, heads, dim = x.shape
    return x.new_full((batch + 1, 2 * seq, heads + 2, dim + 3), float("nan"))[1:, ::2, 1:-1, 3:].copy_(x)


def _permuted(x: Tensor) -> Tensor:
    return x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)


def _at_odd_offset(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _overlapping(x: Tensor) -> Tensor:
    """Tokens that share numbers: each begins one number after the one before it."""
    batch, seq, heads, dim = x.shape
    room = x.new_empty(batch * (seq + heads * dim)).copy_(x.flatten()[:1].expand(batch * (seq + heads * dim)) + 0)
    room[: min(len(room), x.numel())] = x.flatten()[: len(room)]
    return room.as_strided(x.shape, (seq + heads * dim, 1, dim, 1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "packed": lambda x: x,
    "sliced": _sliced,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted": _permuted,
    "odd offset": _at_odd_offset,
    "negative": lambda x: torch._neg_view(-x),
    "one sequence": lambda x: x[:1].expand_as(x),
    "one token": lambda x: x[:, :1].expand_as(x),
    "one head": lambda x: x[:, :, :1].expand_as(x),
    "overlapping": _overlapping,
}
SAME_VALUES = tuple(LAYOUTS)[:7]
"""Layouts that change no number; the others let tokens, heads or sequences share memory."""

MASK_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda mask: mask,
    "sliced": lambda mask: mask.new_ones(mask.shape[0] + 1, 3 * mask.shape[1])[1:, ::3].copy_(mask),
    "transposed": lambda mask: mask.T.contiguous().T,
    "at the end": lambda mask: torch.cat([mask.new_ones(5), mask.flatten()])[5:].view(mask.shape),
}

OF_PACKED = ("function", "function", "autocast", "checkpoint", "use_backend")
WAYS = ("function", "module", "operator", "vmap", "autocast", "checkpoint", "use_backend", "compiled", "compiled dynamic")
HOOKS = ("none", "strided", "clone", "offload")


@contextlib.contextmanager
def saved(hooks: str) -> Iterator[None]:
    unpack: dict[str, Callable[[Tensor], Tensor]] = {
        "strided": lambda x: x.mT.contiguous().mT if x.dim() == 4 else x,
        "clone": lambda x: x.clone(),
    }
    with contextlib.ExitStack() as stack:
        if hooks == "offload":
            stack.enter_context(save_on_cpu())
        elif hooks in unpack:
            stack.enter_context(saved_tensors_hooks(lambda x: x.detach(), unpack[hooks]))
        yield


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink: Tensor | None = None, bias=None
) -> tuple[Tensor, Tensor | None]:
    """`(out, lse)` by the way that the call takes; a module gives no `lse`. Scores are changed in the way "function" alone."""
    case, options = call.case, dict(is_causal=call.case.is_causal, key_padding_mask=mask, sink=sink)
    direct = dict(options, scale=case.scale, backend=call.backend, return_lse=True)

    def function(*qkv, **other):
        other |= dict(bias=bias, softcap=case.softcap or None) if call.way == "function" else {}
        if case.lengths:
            return attend_packed(case, qkv, {**direct, **other})
        return dilated_attention(*qkv, case.pattern, **{**direct, **other})

    if call.way == "module":
        return DilatedAttention(case.pattern, scale=case.scale, backend=call.backend)(q, k, v, **options), None
    if call.way == "operator":
        text = encode_call(case.pattern, case.is_causal, any(call.wants), call.backend)
        return forward_op(q, k, v, mask, q.shape[-1] ** -0.5 if case.scale is None else case.scale, text, sink=sink)
    if call.way == "vmap":
        out, lse = torch.func.vmap(lambda *x: function(*x[:3], key_padding_mask=x[3] if x[3:] else None))(
            *(x.unsqueeze(1) for x in (q, k, v, *(() if mask is None else (mask,))))
        )
        return out.squeeze(1), lse.squeeze(1)
    if call.way == "checkpoint":
        return checkpoint(function, q, k, v, use_reentrant=False)
    if call.way.startswith("compiled"):
        torch.compiler.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic="dynamic" in call.way)(q, k, v)
    if call.way == "use_backend":
        with use_backend(call.backend):
            return function(q, k, v, backend=None)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=call.way == "autocast"):
        return function(q, k, v)


def attend_packed(case: Case, qkv: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    cu_seqlens = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
    given = {name: option for name, option in options.items() if name != "key_padding_mask"}
    out, lse = dilated_attention_varlen(*(x.squeeze(0) for x in qkv), case.pattern, cu_seqlens, **given)
    return out.unsqueeze(0), lse.unsqueeze(0)


def leaves(call: Call, tensors: Tensors) -> list[Tensor]:
    given = zip((*tensors.qkv, tensors.sink), (*call.wants, call.wants[0]), strict=True)
    return [x.detach().requires_grad_(want) for x, want in given if x is not None]


def results(
    call: Call, tensors: Tensors, outputs: tuple[Tensor, Tensor | None], inputs: list[Tensor], **options: bool
) -> Results:
    out, lse = outputs
    found = dict(out=out.detach()) | ({} if lse is None else dict(lse=lse.detach()))
    names = [name for name, x in zip(("dq", "dk", "dv", "dsink"), inputs, strict=False) if x.requires_grad]
    if names:
        through = [(out, tensors.dout.to(out.dtype))]
        if lse is not None and tensors.dlse is not None:
            through.append((lse, tensors.dlse.to(lse.dtype)))
        wanted = [x for x in inputs if x.requires_grad]
        ends, incoming = zip(*through, strict=True)
        grads = torch.autograd.grad(ends, wanted, incoming, allow_unused=True, **options)
        found |= {n: torch.zeros_like(x) if g is None else g for n, x, g in zip(names, wanted, grads, strict=True)}
    return found


def computed(call: Call, tensors: Tensors) -> Results:
    inputs = leaves(call, tensors)
    with saved(call.hooks):
        outputs = attend(call, *inputs[:3], tensors.mask, *inputs[3:], bias=tensors.bias)
    return results(call, tensors, outputs, inputs)


def complaints(call: Call, tensors: Tensors, found: Results) -> list[str]:
    """Compare results with the oracle by the rule of the conformance suite, or within rounding."""
    case = replace(call.case, dtype="bfloat16") if call.way == "autocast" and call.case.dtype != "float64" else call.case
    given = tensors.to(case.dtype)
    if "lse" not in found:
        given = replace(given, dlse=None)
    problem = replace(case, gradients=True).problem(requires_grad=any(call.wants))
    want = accuracy.expected(problem, given, case.lengths)
    wrong = [] if call.way == "autocast" or "lse" not in found else conformance._malformed(found, tensors, case)
    inexact = [check.complaint for check in want.checks(found, case.seq) if not check.passed]
    return wrong if not inexact or within_rounding(problem, given, found, want.exact, case.lengths) else wrong + inexact
