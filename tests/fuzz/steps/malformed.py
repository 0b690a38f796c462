"""Arguments that do not fit."""

import pickle
from dataclasses import replace
from typing import Any

import torch
from fuzz.calls import Call, computed, tensors_of
from fuzz.checks import BY_TORCH, DOES_NOT_FIT, attempt, require, require_raises, require_right
from fuzz.wrong_calls import ARGUMENTS, names_of
from helpers import odd_kinds
from helpers.calls import encode_call

import dilkit
from dilkit import Device, Pattern, Problem, dilated_attention
from dilkit.op.operators import backward_op, forward_op
from dilkit.registry import backends


def wrong(world, call: dict[str, Any], argument: str, how: str):
    one = Call.from_data(call)
    tensors, case = tensors_of(one), one.case
    given = dict(zip(("query", "key", "value"), tensors.qkv, strict=True))
    given |= dict(pattern=case.pattern, key_padding_mask=tensors.mask, is_causal=case.is_causal, return_lse=True)
    given |= dict(scale=case.scale, backend=one.backend)
    about = given["query"] if argument == "key_padding_mask" else given[argument]
    given[argument] = ARGUMENTS[argument][how](about)
    require_raises(lambda: dilated_attention(**given), DOES_NOT_FIT, *names_of(argument))


def kind(world, call: dict[str, Any], name: str, numbers: list[Any]):
    """Try a foreign kind beside the branches: right, or refused by name if no form has such numbers."""
    one, given = Call.from_data(call), [tuple(x) if isinstance(x, (list, tuple)) else x for x in numbers]

    def attend():
        pattern = one.case.pattern.with_branches(getattr(odd_kinds, name)(*given), *one.case.pattern.branches)
        case = replace(one.case, pattern=pattern)
        beside = replace(one, case=case, backend="reference" if backends()[one.backend].refusals(case.problem()) else one.backend)
        return beside, (tensors := tensors_of(beside)), computed(beside, tensors)

    if _has_form(name, given):
        require_right(*attend())
    else:
        require_raises(attend, DOES_NOT_FIT, f"{name}.forms")


def _has_form(name: str, given: list[Any]) -> bool:
    """True if the numbers that a kind is given are those of a form."""
    if name in ("Reach", "Turns"):
        most = given[0] if name == "Turns" else 2**62
        return all(type(x) is int and 0 <= x <= 2**62 for x in given) and 1 <= given[-1] <= most
    runs = given[name == "Gap" :]
    return all(type(x) is int for run in runs for x in run) and all(0 <= start <= stop for start, stop in runs)


def wrong_operator(world, call: dict[str, Any], at: int, how: str, backward: bool):
    """An operator, called directly, with one tensor that does not fit; torch refuses some itself."""
    one = Call.from_data(call)
    tensors, case = tensors_of(one), one.case
    rest = tensors.mask, case.scale or 1.0, encode_call(case.pattern, case.is_causal, backward, one.backend)
    given = [*tensors.qkv]
    if backward:
        given = [tensors.dout, *given, *forward_op(*given, *rest)]
    at %= len(given)
    given[at] = ARGUMENTS["key"][how](given[at])
    op = backward_op if backward else forward_op
    require_raises(lambda: op(*given, *rest), (*DOES_NOT_FIT, *BY_TORCH))


def text(world, call: dict[str, Any], at: int, cut: int, put: str):
    """An operator with a text that is not as dilkit writes it: computed, or refused."""
    one = Call.from_data(call)
    tensors, case = tensors_of(one), one.case
    text = encode_call(case.pattern, case.is_causal, False, one.backend)
    at %= len(text) + 1
    text = text[:at] + put + text[at + cut :]
    attempt(lambda: forward_op(*tensors.qkv, tensors.mask, 1.0, text))


def giant(world, call: dict[str, Any], tokens: int, mask: bool):
    """A sequence of so many tokens in the memory of one that there is no room for the result."""
    one = Call.from_data(call)
    tensors = tensors_of(one)

    def action():
        first = [x[:, :1].expand(-1, 2**tokens, -1, -1) for x in tensors.qkv]
        ignored = torch.zeros(len(first[0]), 1, dtype=torch.bool).expand(-1, 2**tokens) if mask else None
        dilated_attention(*first, one.case.pattern, key_padding_mask=ignored, backend=one.backend)

    require_raises(action, (*DOES_NOT_FIT, RuntimeError, MemoryError))


def pattern(world, fields: dict[str, Any]):
    """A pattern of any arguments: refused, or a value that survives JSON and pickle."""
    made = attempt(lambda: Pattern(**fields))
    if made is not None:
        require(Pattern.from_json(made.to_json()) == made == pickle.loads(pickle.dumps(made)), f"{made} is not itself")
        require(str(made) != made.describe(), "no description")


def problem(world, fields: dict[str, Any], device):
    """The facts of a call, any of them anything: refused, or explained."""
    where = attempt(lambda: Device.assume(device))
    made = attempt(lambda: Problem(pattern=Pattern([8, 16], [1, 2]), **fields, **({} if where is None else {"device": where})))
    if made is not None:
        require(str(dilkit.explain(made)) != "", "no explanation")
        require(made.flops() >= 0, f"{made} has {made.flops()} FLOPs")
