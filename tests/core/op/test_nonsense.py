"""Plug-ins that return or raise nonsense."""

import re
from dataclasses import replace

import pytest
import torch
from helpers.fakes import registered

from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.testing.conformance import check, repeats_that_differ
from dilkit.testing.problems import LARGE, PROBLEMS

CASE = next(case for case in PROBLEMS if case.gradients and case.dtype == "float32" and case.mask in (None, "none"))


class Gone(BaseException):
    """A BaseException that is no Exception."""


def raising(error):
    def act(*_):
        raise error

    return act


FORWARD = {
    "None": (lambda out, lse, query: None, "NoneType; the tensors out, lse are needed"),
    "out alone": (lambda out, lse, query: out, "Tensor; the tensors out, lse are needed"),
    "three tensors": (lambda out, lse, query: (out, lse, lse), "Tensor, Tensor, Tensor; the tensors out, lse"),
    "arrays": (lambda out, lse, query: (out.numpy(), lse.numpy()), "ndarray, ndarray; the tensors out, lse"),
    "a shape": (lambda out, lse, query: (out.transpose(1, 2), lse), "returned out as"),
    "a dtype": (lambda out, lse, query: (out.double(), lse), "returned out as torch.float64"),
    "the dtype of lse": (lambda out, lse, query: (out, lse.half()), "returned lse as torch.float16"),
    "a device": (lambda out, lse, query: (out.to("meta"), lse), "on meta"),
    "transposed lse": (lambda out, lse, query: (out, lse.mT), "returned lse as"),
    "a view of an input": (lambda out, lse, inputs: (inputs.query[:], lse), "out in the memory of an input"),
    "an input": (lambda out, lse, inputs: (inputs.query.copy_(out), lse), "out in the memory of an input"),
    "one tensor twice": (lambda out, lse, query: (out, out.view(-1)[: lse.numel()].view_as(lse)), "lse in the memory of out"),
    "a sparse tensor": (lambda out, lse, query: (out.to_sparse(), lse), "Error"),
    "NaN": (lambda out, lse, query: (out * torch.nan, lse), "out: the error is not finite"),
    "an infinite lse": (lambda out, lse, query: (out, lse + torch.inf), "lse: the error is not finite"),
    "an input changed": (lambda out, lse, inputs: (out, inputs.query.mul_(2) is None or lse), "an input was changed"),
    "an exception": (raising(RuntimeError("no\nsuch \x1b[31mdriver")), r"RuntimeError: no such \\x1b\[31mdriver"),
    "SystemExit": (raising(SystemExit(0)), "SystemExit: 0"),
    "no Exception": (raising(Gone("far away")), "Gone: far away"),
}
BACKWARD = {
    "None": (lambda *grads: None, "NoneType; the tensors dquery, dkey, dvalue"),
    "two gradients": (lambda dq, dk, dv: (dq, dk), "Tensor, Tensor; the tensors dquery, dkey, dvalue"),
    "a shape": (lambda dq, dk, dv: (dq, dk, dv[:, :1]), "returned dvalue as"),
    "one gradient twice": (lambda dq, dk, dv: (dq, dk, dk), "dvalue in the memory of dkey"),
    "NaN": (lambda dq, dk, dv: (dq, dk * torch.nan, dv), "dk: the error is not finite"),
}


def plug_in(name, **methods):
    return type("PlugIn", (Reference,), methods)(name=name)


def odd_forward(odd):
    return lambda self, query, *inputs: odd(*Reference.forward(self, query, *inputs), query)


def odd_backward(odd):
    return lambda self, *inputs: odd(*Reference.backward(self, *inputs))


PLUG_INS = {
    **{f"forward: {name}": (dict(forward=odd_forward(odd)), text) for name, (odd, text) in FORWARD.items()},
    **{f"backward: {name}": (dict(backward=odd_backward(odd)), text) for name, (odd, text) in BACKWARD.items()},
}


@pytest.mark.parametrize(("methods", "text"), PLUG_INS.values(), ids=PLUG_INS)
def test_nonsense_fails_with_a_reason(methods, text):
    with registered(plug_in("nonsense", **methods)) as name:
        found = check(name, CASE)
    assert found.verdict == "failed"
    assert any(re.search(text, reason) for reason in found.reasons), found.reasons
    assert all(reason.isprintable() for reason in found.reasons)


def test_a_backend_that_fails_when_it_is_repeated_differs():
    calls = iter([False, True, True, True])

    def fickle(self, *inputs):
        if next(calls):
            raise RuntimeError("no more")
        return Reference.forward(self, *inputs)

    with registered(plug_in("fickle", forward=fickle)) as name:
        assert repeats_that_differ(name, CASE, "cpu", 3) == 3


def test_results_that_change_are_counted():
    class Restless(Native):
        name = "restless"

        def forward(self, *arguments):
            out, lse = super().forward(*arguments)
            self.calls = getattr(self, "calls", 0) + 1
            return (out + 1 if self.calls == 3 else out), lse

    with registered(Restless()) as name:
        assert repeats_that_differ(name, replace(LARGE[0], seq=64, head_dim=8), "cpu", 4) == 1
