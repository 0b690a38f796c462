"""`dilated_attention` under torch.compile and torch.export, and torch's own checks of an operator."""

import io

import pytest
import torch
from helpers.calls import NEEDS_COMPILER, PATTERN, TORCH_WARNS, Recorder, attend, encode_call, tensors
from helpers.fakes import registered

import dilkit
from dilkit import Pattern, dilated_attention
from dilkit.op.operators import backward_op, forward_op

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), TORCH_WARNS]


@pytest.fixture
def log():
    entries = []
    with registered(Recorder("first", entries)), registered(Recorder("second", entries)):
        yield entries


@pytest.mark.parametrize(
    ("dtype", "masked"), [(torch.float32, True), pytest.param(torch.bfloat16, False, marks=pytest.mark.slow)]
)
def test_opcheck(dtype, masked):
    inputs = tensors(kv_heads=2, dtype=dtype, requires_grad=True)
    mask = torch.rand(2, 20) < 0.3 if masked else None
    call = encode_call(PATTERN, True, True, "reference")
    torch.library.opcheck(forward_op, (*inputs, mask, 0.3, call))
    out, lse = forward_op(*inputs, mask, 0.3, call)
    saved = [x.detach() for x in (*inputs, out, lse)]
    torch.library.opcheck(backward_op, (torch.randn_like(saved[3]), *saved, mask, 0.3, call))


def call_of_everything(query, key, value, mask):
    out, lse = attend(query * 2, key, value, is_causal=True, key_padding_mask=mask, return_lse=True)
    return out + 1, lse.masked_fill(lse == -torch.inf, 0)


@pytest.mark.parametrize(
    ("compiler", "dynamic"),
    [
        pytest.param("aot_eager", False, marks=pytest.mark.slow),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=[NEEDS_COMPILER, pytest.mark.slow]),
        pytest.param("inductor", True, marks=[NEEDS_COMPILER, pytest.mark.slow]),
    ],
)
def test_compiled_equals_eager(compiler, dynamic):
    compiled = torch.compile(call_of_everything, fullgraph=True, dynamic=dynamic, backend=compiler)
    for batch, seq in ((2, 20), (3, 33)) if dynamic else ((2, 20),):
        inputs, mask = tensors(batch, seq, kv_heads=2, requires_grad=True), torch.rand(batch, seq) < 0.3
        results = []
        for function in (compiled, call_of_everything):
            out, lse = function(*inputs, mask)
            results.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), inputs)))
        torch.testing.assert_close(*results)


def test_a_pattern_never_used_before_can_be_traced():
    """dynamo traces no locks and no JSON: facts of a pattern must exist before."""
    pattern = Pattern([4, 12], [2, 3], heads=[(0, 2), None])
    inputs = tensors()
    compiled = torch.compile(lambda *x: dilated_attention(*x, pattern, backend="reference"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), dilated_attention(*inputs, pattern, backend="reference"))


def test_scale_may_change_from_call_to_call():
    inputs = tensors()
    compiled = torch.compile(lambda s, *x: attend(*x, scale=s), fullgraph=True, backend="aot_eager")
    for scale in (0.1, 3, -1.5):
        torch.testing.assert_close(compiled(scale, *inputs), attend(*inputs, scale=scale))


def test_the_choice_of_backend_is_made_when_compiled_code_runs(log, monkeypatch):
    def step(compiled):
        log.clear()
        compiled(*tensors(requires_grad=True)).sum().backward()
        return [(name, phase) for name, phase, _ in log]

    compiled = torch.compile(lambda *x: attend(*x, backend=None), fullgraph=True, backend="aot_eager")
    for name in ("first", "second", "first"):
        with dilkit.use_backend(name):
            assert step(compiled) == [(name, "forward"), (name, "backward")]
    monkeypatch.setenv("DILKIT_BACKEND", "second")
    assert step(compiled) == [("second", "forward"), ("second", "backward")]
    by_argument = torch.compile(lambda *x: attend(*x, backend="first"), fullgraph=True, backend="aot_eager")
    assert step(by_argument) == [("first", "forward"), ("first", "backward")]


def test_an_error_of_the_choice_comes_through_compiled_code():
    compiled = torch.compile(lambda *x: attend(*x, backend="nobody"), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"'nobody' is not a known backend; known: .*reference"):
        compiled(*tensors())


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        return attend(query, key, value, is_causal=True)


def test_exported_programs_can_be_stored_and_take_other_lengths():
    sizes = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("seq", min=1)}
    program = torch.export.export(Attention(), tensors(), dynamic_shapes=(sizes,) * 3)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    other = tensors(3, 31)
    torch.testing.assert_close(torch.export.load(stored).module()(*other), Attention()(*other))
