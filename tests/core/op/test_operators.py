"""Autograd through `dilated_attention`."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from helpers.calls import PATTERN, Recorder, attend, encode_call, gradients, tensors
from helpers.fakes import registered

import dilkit
from dilkit import Inputs, Problem
from dilkit.op.operators import forward_op
from dilkit.oracle import oracle_attention


def attend_lse(*inputs, **options):
    return attend(*inputs, return_lse=True, **options)


@pytest.mark.parametrize("only_lse", [False, True])
def test_the_gradient_of_lse_is_the_oracles_where_rows_see_nothing(only_lse):
    inputs, mask = tensors(kv_heads=2, dtype=torch.float64), torch.rand(2, 20) < 0.5
    mask[0, :12] = True

    def outputs(out, lse):
        lse = lse.masked_fill(lse == -math.inf, 0)
        return lse if only_lse else (out, lse)

    ours = gradients(lambda *x: outputs(*attend_lse(*x, is_causal=True, key_padding_mask=mask)), inputs)
    exact = gradients(lambda *x: outputs(*oracle_attention(*x, PATTERN, is_causal=True, key_padding_mask=mask)), inputs)
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("wanted", [w for w in itertools.product([False, True], repeat=3) if any(w)], ids=str)
def test_gradients_for_some_inputs_only(wanted):
    inputs = tensors()
    everything = gradients(attend, inputs)
    some = [x.clone().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
    out = attend(*some)
    ((out.double() + 1).sin() * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    for x, full, w in zip(some, everything, wanted, strict=True):
        assert (x.grad is not None) == w
        if w:
            torch.testing.assert_close(x.grad, full)


def test_what_is_saved_for_the_backward():
    saved = []
    inputs, mask = tensors(requires_grad=True), torch.zeros(2, 20, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            assert not attend(*inputs).requires_grad
        with torch.inference_mode():
            attend(*inputs)
        attend(*(x.detach() for x in inputs))
        assert not saved
        attend(*inputs, key_padding_mask=mask)
    shapes = [tuple(x.shape) for x in saved]
    assert sorted(shapes) == sorted([*[(2, 20, 4, 8)] * 4, (2, 4, 20), (2, 20)])  # query, key, value, out; lse; mask


def test_double_backward_is_refused():
    inputs = tensors(requires_grad=True)
    (first,) = torch.autograd.grad(attend(*inputs).sin().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only: create_graph=True"):
        first.sum().backward()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_empty_batches_and_sequences(shape, masked):
    inputs = tensors(*shape, heads=4, kv_heads=2, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool) if masked else None
    out, lse = attend_lse(*inputs, key_padding_mask=mask)
    assert (out.shape, lse.shape) == (inputs[0].shape, (shape[0], 4, shape[1]))
    (out.sum() + lse.sum()).backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


def test_a_single_head_dimension_may_have_any_stride():
    wide = [torch.randn(2, 20, 4, 3) for _ in range(3)]
    narrow = [x[..., ::3] for x in wide]
    assert narrow[0].stride(-1) == 3
    assert torch.equal(attend(*narrow), attend(*(x.contiguous() for x in narrow)))


def test_the_backward_goes_to_whom_the_forward_went():
    log = []
    with registered(Recorder("first", log)), registered(Recorder("second", log)):
        with dilkit.use_backend("first"):
            out = attend(*tensors(requires_grad=True), backend=None)
        with dilkit.use_backend("second"):
            out.sum().backward()
    assert [(name, phase) for name, phase, _ in log] == [("first", "forward"), ("first", "backward")]


def test_threads_do_not_disturb_each_other():
    problems = [tensors(seq=8 + i) for i in range(16)]
    expected = [gradients(attend_lse, inputs) for inputs in problems]
    log = []
    names = [f"thread{i}" for i in range(16)]

    def work(name, inputs):
        with dilkit.use_backend(name):
            return gradients(lambda *x: attend_lse(*x, backend=None), inputs)

    with ExitStack() as known, ThreadPoolExecutor(8) as pool:
        for name in names:
            known.enter_context(registered(Recorder(name, log)))
        results = list(pool.map(work, names, problems))
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
    assert all([phase for n, phase, _ in log if n == name][:2] == ["forward", "backward"] for name in names)


class TestThePatternCache:
    def misses(self, *shape, dtype=torch.float32, **options):
        query, key, value = torch.zeros(3, *shape, dtype=dtype).unbind()
        before = dilkit.plan.cache_info().misses
        dilkit.dilated_attention(query, key, value, PATTERN, backend="reference", **options)
        return dilkit.plan.cache_info().misses - before

    def test_a_second_call_prepares_nothing(self):
        self.misses(1, 20, 4, 3)  # by now a backend is selected, for which others lower the pattern
        dilkit.plan.cache_clear()
        assert self.misses(1, 20, 4, 3) == 1
        assert self.misses(1, 20, 4, 3) == 0
        assert dilkit.plan.cache_info().entries == 1

    @pytest.mark.parametrize("options", [dict(is_causal=True), dict(scale=0.5), dict(dtype=torch.float64)], ids=str)
    def test_a_call_with_another_fact_is_prepared_anew(self, options):
        for given in ({}, options):
            self.misses(1, 20, 4, 3, **given)
        dilkit.plan.cache_clear()
        assert self.misses(1, 20, 4, 3) == 1
        assert self.misses(1, 20, 4, 3, **options) == 1

    def test_a_new_backend_is_asked_at_the_next_call(self):
        log = []
        inputs, recorder = tensors(), Recorder("reference", log)
        attend(*inputs)
        with registered(recorder):
            attend(*inputs)
        attend(*inputs)
        assert [name for name, *_ in log] == ["reference"]

    def test_what_a_backend_encodes_is_kept_with_the_call(self):
        """Both passes share it; a second call encodes nothing, and a direct call of a backend has none."""
        encoded = []
        seen = []

        class Encoding(Recorder):
            def encode(self, problem):
                encoded.append(SimpleNamespace(nbytes=8, problem=problem))
                return encoded[-1]

            def forward(self, inputs, problem):
                seen.append(problem.encoded)
                return super().forward(inputs, problem)

        inputs = tensors()
        with registered(Encoding("encoding", [])) as name:
            for _ in range(2):
                attend(*inputs, backend=name)
            direct = Problem.of(inputs[0], inputs[1], PATTERN)
            Encoding(name, []).forward(Inputs(*inputs), direct)
        assert len(encoded) == 1
        assert seen == [encoded[0], encoded[0], None]
        assert encoded[0].problem.encoded is None


def test_what_an_operator_takes_a_public_function_still_refuses():
    """They have calls of their own prepared: an operator may be given any strides."""
    inputs = [x.mT.contiguous().mT for x in tensors()]
    text = encode_call(PATTERN, False, False, "reference")
    assert forward_op(*inputs, None, 0.3, text)[0].shape == inputs[0].shape
    with pytest.raises(ValueError, match=r"query has stride \d+ in its last dimension"):
        dilkit.dilated_attention(*inputs, PATTERN, scale=0.3, backend="reference")


def test_a_text_of_another_version_is_refused():
    """Graphs that it exported have the arguments of an operator in another order."""
    text = encode_call(PATTERN, False, False, "reference")
    with pytest.raises(ValueError, match="another version of dilkit; export the graph again"):
        forward_op(*tensors(), None, 0.3, f"8{text[1:]}")
