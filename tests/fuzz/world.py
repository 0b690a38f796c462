"""What a run of the fuzzer does: steps as plain data, performed one after the other in one process.

A step is a dict: `do` names a method of `World`, the rest are its arguments. It raises `Wrong` where dilkit does.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz.calls import Call, attend, complaints, computed, leaves, results, saved, tensors_of
from fuzz.wrong_calls import ARGUMENTS, names_it
from helpers.ranks import over_ranks
from torch import Tensor

import dilkit
from dilkit import Pattern, dilated_attention, plan
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.testing.poison import poisoned_memory
from dilkit.testing.tensors import Tensors

Step = dict[str, Any]
DOES_NOT_FIT = (ValueError, TypeError)
BY_TORCH = (RuntimeError, NotImplementedError)
"""What torch itself raises for arguments that do not fit an operator's schema, or devices that have no memory."""
MOST_PENDING = 4


class Wrong(AssertionError):
    """A result that is not right, an error of the wrong kind, or none where one is due."""


@dataclass
class Pending:
    """A forward pass whose backward pass is still to come."""

    call: Call
    tensors: Tensors
    inputs: list[Tensor]
    outputs: tuple[Tensor, Tensor | None]


class World:
    """All that lasts from one step to the next: the pattern cache, its limit, settings, and forward passes that wait."""

    def __init__(self) -> None:
        self.pending: list[Pending] = []
        self.before = dict(os.environ)
        self.threads = torch.get_num_threads()
        plan.cache_clear()

    def close(self) -> None:
        """Everything as it was before."""
        torch.set_num_threads(self.threads)
        for name in os.environ.keys() - self.before.keys():
            del os.environ[name]
        os.environ.update(self.before)

    def perform(self, step: Step) -> None:
        """Do one step. Raises `Wrong`, or whatever dilkit raises that it must not."""
        step = copy.deepcopy(step)
        getattr(self, step.pop("do"))(**step)

    def set(self, name: str, value: str) -> None:
        """An environment variable, or the number of threads of torch."""
        if name == "threads":
            torch.set_num_threads(int(value))
        else:
            os.environ[name] = value

    def clear(self) -> None:
        """Empty the pattern cache."""
        plan.cache_clear()
        info = plan.cache_info()
        require(info.entries == info.bytes == 0, f"the cache is not empty: {info}")

    def call(self, call: dict[str, Any]) -> None:
        """One call, forward and backward, against the oracle."""
        one = Call.from_data(call)
        tensors = tensors_of(one)
        with poisoned_memory() if one.way in ("function", "operator") else threading.Lock():
            found = computed(one, tensors)
        require_right(one, tensors, found)

    def again(self, call: dict[str, Any], threads: int) -> None:
        """The same call twice, with other numbers of threads and once without a cache: the same bits by the CPU kernel."""
        one = replace(Call.from_data(call), backend="native")
        tensors = tensors_of(one)
        first = computed(one, tensors)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        plan.cache_clear()
        second = computed(one, tensors)
        torch.set_num_threads(before)
        require_same(first, second, f"with {before} and {threads} threads")

    def together(self, calls: list[dict[str, Any]], clears: int) -> None:
        """Several calls at once, each in a thread of its own, while another thread clears the cache."""
        each = [Call.from_data(call) for call in calls]
        given = [tensors_of(one) for one in each]
        jobs: list[Callable[[], Any]] = [lambda one=one, x=x: computed(one, x) for one, x in zip(each, given, strict=True)]
        found = in_threads([*jobs, lambda: [plan.cache_clear() for _ in range(clears)]])
        for one, tensors, result in zip(each, given, found, strict=False):
            require_right(one, tensors, result)

    def ranks(self, call: dict[str, Any], cuts: Sequence[int], schedule: str, fuse_branches: bool) -> None:
        """The call over ranks that are threads, with shards of any lengths."""
        one = Call.from_data(call)
        tensors = tensors_of(one)
        options: dict[str, Any] = dict(is_causal=one.case.is_causal, scale=one.case.scale, gradients=all(one.wants))
        options |= dict(schedule=schedule, fuse_branches=fuse_branches, timeout=100.0)
        try:
            found = over_ranks(tensors, one.case.pattern, cuts, **options)
        except ValueError as error:
            require("schedule=" in str(error), f"refused: {error}")
            return
        one = replace(one, wants=(all(one.wants),) * 3)
        require_right(one, replace(tensors, dlse=None), found.results)

    def forward(self, call: dict[str, Any]) -> None:
        """A forward pass whose backward pass comes later, if at all."""
        one = Call.from_data(call)
        tensors = tensors_of(one)
        inputs = leaves(one, tensors)
        with saved(one.hooks):
            outputs = attend(one, *inputs, tensors.mask)
        self.pending = [*self.pending, Pending(one, tensors, inputs, outputs)][-MOST_PENDING:]

    def backward(self, at: int, after: str, which: int) -> None:
        """The backward pass of one that waits, after something was done to a tensor that it uses."""
        if not self.pending:
            return
        one = self.pending.pop(at % len(self.pending))
        target = [*one.inputs, one.outputs[0]][which % 4]
        plain = one.call.hooks == "none" and one.call.way in ("function", "operator") and any(one.call.wants)
        if after == "in place" and plain and target.is_contiguous():
            with torch.no_grad():
                target.mul_(2.0)
            require_raises(lambda: self._gradients(one), (RuntimeError,), "modified by an inplace operation")
        elif after == "memory gone" and plain:
            target.untyped_storage().resize_(0)
            require_raises(lambda: self._gradients(one), DOES_NOT_FIT, "beyond the 0 bytes of its storage")
        elif after == "behind autograd" and target.is_contiguous():
            target.data.zero_()
            self._gradients(one)  # of other numbers than the forward pass had
        else:
            found = in_threads([lambda: self._gradients(one)])[0] if after == "other thread" else self._gradients(one)
            require_right(one.call, one.tensors, found)

    @staticmethod
    def _gradients(one: Pending) -> Any:
        return results(one.call, one.tensors, one.outputs, one.inputs)

    def wrong(self, call: dict[str, Any], argument: str, how: str) -> None:
        """A call with one argument that does not fit."""
        one = Call.from_data(call)
        tensors, case = tensors_of(one), one.case
        given: dict[str, Any] = dict(zip(("query", "key", "value"), tensors.qkv, strict=True))
        given |= dict(pattern=case.pattern, key_padding_mask=tensors.mask, is_causal=case.is_causal, return_lse=True)
        given |= dict(scale=case.scale, backend=one.backend)
        about = given["query"] if argument == "key_padding_mask" else given[argument]
        given[argument] = ARGUMENTS[argument][how](about)
        require_refused(argument, lambda: dilated_attention(**given))

    def wrong_operator(self, call: dict[str, Any], at: int, how: str, backward: bool) -> None:
        """An operator, called directly, with one tensor that does not fit; torch refuses some itself."""
        one = Call.from_data(call)
        tensors, case = tensors_of(one), one.case
        text = encode_call(case.pattern, case.is_causal, backward, one.backend)
        rest = tensors.mask, case.scale or 1.0, text
        given = [*tensors.qkv]
        if backward:
            given = [tensors.dout, *given, *forward_op(*given, *rest)]
        at %= len(given)
        given[at] = ARGUMENTS["key"][how](given[at])
        op = backward_op if backward else forward_op
        require_raises(lambda: op(*given, *rest), (*DOES_NOT_FIT, *BY_TORCH))

    def text(self, call: dict[str, Any], at: int, cut: int, put: str) -> None:
        """An operator with a text that is not as dilkit writes it: computed, or refused."""
        one = Call.from_data(call)
        tensors, case = tensors_of(one), one.case
        text = encode_call(case.pattern, case.is_causal, False, one.backend)
        at %= len(text) + 1
        text = text[:at] + put + text[at + cut :]
        attempt(lambda: forward_op(*tensors.qkv, tensors.mask, 1.0, text), DOES_NOT_FIT)

    def pattern(self, fields: dict[str, Any]) -> None:
        """A pattern of any arguments: refused, or a value that survives JSON and pickle."""
        made = attempt(lambda: Pattern(**fields), DOES_NOT_FIT)
        if made is not None:
            require(Pattern.from_json(made.to_json()) == made == pickle.loads(pickle.dumps(made)), f"{made} is not itself")
            require(str(made) != made.describe(), "no description")

    def order(self, call: dict[str, Any], shape: Sequence[int], curve: str, options: dict[str, Any]) -> None:
        """A token order of a grid of any sides: refused, or a permutation, along which attention is right."""
        order = attempt(lambda: dilkit.order(shape, curve, **options), DOES_NOT_FIT)
        if order is None:
            return
        tokens = torch.arange(len(order))
        require(torch.equal(torch.tensor(order.perm).long().sort().values, tokens), f"{order} is no permutation")
        require(torch.equal(order.restore(order.apply(tokens[None])), tokens[None]), f"{order} does not restore")
        one = Call.from_data(call)
        case = replace(one.case, seq=len(order), is_causal=False)
        one = replace(one, case=case, way="function", hooks="none", wants=(False,) * 3)
        tensors = tensors_of(one)
        out, lse = dilkit.ordered_dilated_attention(
            *tensors.qkv,
            case.pattern,
            order,
            key_padding_mask=tensors.mask,
            scale=case.scale,
            backend=one.backend,
            return_lse=True,
        )
        found = dict(out=order.apply(out), lse=order.apply(lse, dim=2))
        q, k, v, dout = (order.apply(x) for x in (*tensors.qkv, tensors.dout))
        mask = None if tensors.mask is None else order.apply(tensors.mask)
        require_right(one, replace(tensors, query=q, key=k, value=v, dout=dout, mask=mask), found)

    def empty(self, call: dict[str, Any], batch: bool) -> None:
        """No sequences, or none with a token: nothing, and gradients of nothing."""
        one = Call.from_data(call)
        at = 0 if batch else 1
        qkv = [x.detach().narrow(at, 0, 0).requires_grad_() for x in tensors_of(one).qkv]
        out = dilated_attention(*qkv, one.case.pattern, backend=one.backend)
        out.sum().backward()
        require(out.shape == qkv[0].shape and all(x.grad.shape == x.shape for x in qkv), "shapes differ")


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each job returns, each run in a thread of its own; the first error is raised."""
    found: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(at: int) -> None:
        try:
            found[at] = jobs[at]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def require(right: bool, text: str) -> None:
    """Raise `Wrong` with this text unless `right`."""
    if not right:
        raise Wrong(text)


def require_right(call: Call, tensors: Tensors, found: Any) -> None:
    """Raise `Wrong` unless the results of a call are what the oracle says, within what the project allows."""
    wrong = complaints(call, tensors, found)
    require(not wrong, "; ".join(wrong))


def require_same(first: dict[str, Tensor], second: dict[str, Tensor], when: str) -> None:
    """Raise `Wrong` unless all bits are the same."""
    other = [name for name, x in first.items() if not torch.equal(x, second[name])]
    require(not other, f"{', '.join(other)} differ {when}")


def require_refused(argument: str, action: Callable[[], Any]) -> None:
    """Raise `Wrong` unless `action` raises a ValueError or TypeError that names the argument."""
    try:
        action()
    except DOES_NOT_FIT as error:
        require(names_it(argument, str(error)), f"{type(error).__name__} does not name {argument}: {error}")
    except Exception as error:
        raise Wrong(f"{type(error).__name__} where ValueError or TypeError is due: {error}") from error
    else:
        raise Wrong(f"{argument} was accepted")


def require_raises(action: Callable[[], Any], errors: tuple[type[Exception], ...], text: str = "") -> None:
    """Raise `Wrong` unless `action` raises one of `errors` with this text."""
    try:
        action()
    except errors as error:
        require(text in str(error), f"{text!r} is not in {type(error).__name__}: {error}")
    except Exception as error:
        raise Wrong(f"{type(error).__name__} where {errors[0].__name__} is due: {error}") from error
    else:
        raise Wrong("nothing was raised")


def attempt(action: Callable[[], Any], errors: tuple[type[Exception], ...]) -> Any:
    """What `action` returns; None where it raises one of `errors`."""
    try:
        return action()
    except errors:
        return None
    except Exception as error:
        raise Wrong(f"{type(error).__name__} where {errors[0].__name__} is due: {error}") from error
