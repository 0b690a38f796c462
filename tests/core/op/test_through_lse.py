"""Gradients through `lse` where their sizes are far apart."""

import pytest
import torch

from dilkit import Alibi, Pattern, dilated_attention


def gradients(query, key, value, dlse):
    inputs = query.clone().requires_grad_(), key.clone().requires_grad_()
    lse = dilated_attention(*inputs, value, Pattern([16, 64], [1, 4]), return_lse=True)[1]
    return torch.autograd.grad((lse * dlse.to(lse.dtype)).sum(), inputs)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ratio", [1e-4, 1.0, 1e4])
def test_each_gradient_is_as_exact_as_its_dtype(dtype, ratio, size):
    query, key, value = torch.randn(3, 1, 64, 2, 8).unbind()
    query, key, value = (x.to(dtype) for x in (query * ratio**0.5, key / ratio**0.5, value))
    dlse = size * torch.randn(1, 2, 64)
    of_fp64 = gradients(query.double(), key.double(), value.double(), dlse)
    for gradient, exact in zip(gradients(query, key, value, dlse), of_fp64, strict=True):
        rounded = exact.to(dtype).double() - exact  # the least that there can be, in subnormal numbers too
        assert (gradient.double() - exact).norm() <= 3 * (torch.finfo(dtype).eps * exact.norm() + rounded.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero", ["scale", "query", "key", "dlse"])
def test_what_is_zero_makes_gradients_of_zero(dtype, zero):
    """And no NaN: numbers are multiplied by powers of two that the largest of them decides."""
    query, key, value = torch.randn(3, 1, 64, 2, 8, dtype=dtype).unbind()
    given = dict(query=query, key=key, dlse=1000 * torch.randn(1, 2, 64))
    given |= {zero: torch.zeros_like(given[zero])} if zero in given else {}
    inputs = given["query"].requires_grad_(), given["key"].requires_grad_()
    scale = 0.0 if zero == "scale" else None
    lse = dilated_attention(*inputs, value, Pattern([16, 64], [1, 4]), return_lse=True, scale=scale)[1]
    dquery, dkey = torch.autograd.grad((lse * given["dlse"]).sum(), inputs)
    assert bool(dquery.isfinite().all() and dkey.isfinite().all())
    assert (not bool(dquery.any()), not bool(dkey.any())) == dict(
        scale=(True, True), query=(False, True), key=(True, False), dlse=(True, True)
    )[zero]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_in_batches_are_those_of_a_loop(dtype):
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 20, 2, 8, dtype=dtype).unbind()]
    slopes = torch.rand(2, requires_grad=True)
    results = dilated_attention(*inputs, Pattern([4, 16], [1, 4]), bias=Alibi(slopes), return_lse=True)
    of_results = [torch.randn(3, *x.shape, dtype=x.dtype) for x in results]

    def pulled(*grads, batched=False):
        return torch.autograd.grad(results, [*inputs, slopes], grads, retain_graph=True, is_grads_batched=batched)

    one_by_one = zip(*(pulled(*grads) for grads in zip(*of_results, strict=True)), strict=True)
    torch.testing.assert_close(pulled(*of_results, batched=True), tuple(map(torch.stack, one_by_one)))
