"""`dilated_attention` under autocast, vmap and the transforms it refuses."""

import pytest
import torch
from helpers.calls import PATTERN, attend, gradients, tensors
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from dilkit import Problem, dilated_attention

# torch's own, at the first forward-mode derivative in a process.
TORCH_WARNS = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
LOW = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)


@pytest.mark.parametrize(
    ("dtype", "low", "computed"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_autocast_computes_in_its_dtype(dtype, low, computed):
    inputs = tensors(dtype=dtype)
    with torch.autocast("cpu", dtype=low):
        found, got = attend(*inputs, return_lse=True), gradients(attend, inputs)
    expected = attend(*(x.to(computed) for x in inputs), return_lse=True)
    assert found[0].dtype == computed
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {x.dtype for x in got} == {dtype}
    torch.testing.assert_close(got, gradients(lambda *x: attend(*(y.to(computed) for y in x)), inputs))


@LOW
def test_mixed_dtypes_meet_under_autocast_only(low):
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=low):
        assert attend(query, key.bfloat16(), value.half()).dtype == low
        assert attend(query.double(), key, value).dtype == torch.float64
    with pytest.raises(ValueError, match=r"key is torch.bfloat16 .* query torch.float32"):
        attend(query, key.bfloat16(), value)


def test_autocast_around_the_backward_changes_nothing():
    inputs = tensors(requires_grad=True)
    total = sum(x.sin().sum() for x in attend(*inputs, return_lse=True))
    expected = torch.autograd.grad(total, inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(total, inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 1, 0), (None, None, -2), (-4, 1, None)], ids=str
)
def test_vmap_is_a_loop(in_dims):
    inputs = tuple(
        torch.randn((2, 12, 4, 8) if dim is None else (*(2, 12, 4, 8)[: dim % 5], 3, *(2, 12, 4, 8)[dim % 5 :]))
        for dim in in_dims
    )

    def loop(*x):
        return torch.stack(
            [attend(*(y if d is None else y.select(d, i) for y, d in zip(x, in_dims, strict=True))) for i in range(3)]
        )

    mapped = torch.func.vmap(attend, in_dims=in_dims)
    torch.testing.assert_close(mapped(*inputs), loop(*inputs))
    torch.testing.assert_close(gradients(mapped, inputs), gradients(loop, inputs))


@pytest.mark.parametrize("mask_dim", [0, 1, None])
def test_vmap_over_masks_and_lse(mask_dim):
    inputs = torch.randn(3, 2, 12, 4, 8)
    mask = torch.rand(2, 12) < 0.5 if mask_dim is None else torch.rand(3, 2, 12).lt(0.5).movedim(0, mask_dim)

    def call(x, mask):
        return attend(x, x, x, key_padding_mask=mask, return_lse=True)

    mapped = torch.func.vmap(call, in_dims=(0, mask_dim))(inputs, mask)
    rows = [call(inputs[i], mask if mask_dim is None else mask.select(mask_dim, i)) for i in range(3)]
    torch.testing.assert_close(mapped, tuple(map(torch.stack, zip(*rows, strict=True))))


def test_vmap_nests_and_takes_empty_batches():
    x = torch.randn(3, 2, 2, 12, 4, 8)
    nested = torch.func.vmap(torch.func.vmap(lambda y: attend(y, y, y)))(x)
    torch.testing.assert_close(nested, attend(*[x.flatten(0, 2)] * 3).view(x.shape))
    assert torch.func.vmap(lambda y: attend(y, y, y))(x[:, 0, :0]).shape == (3, 0, 12, 4, 8)


def test_vmap_over_the_last_dimension_says_what_it_needs():
    x = torch.randn(2, 12, 4, 8, 3)
    with pytest.raises(ValueError, match="stride 3 in its last dimension"):
        torch.func.vmap(lambda y: attend(y, y, y), in_dims=-1)(x)


@TORCH_WARNS
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian"])
def test_transforms_of_torch_func_are_refused(transform):
    query, key, value = tensors(1, 4, 2, 2, 2)
    with pytest.raises(RuntimeError, match=r"dilated_attention does not support torch\.func\.grad"):
        getattr(torch.func, transform)(lambda q: attend(q, key, value).sum())(query)


@TORCH_WARNS
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("grad_mode", [True, False])
def test_forward_mode_is_refused(at, grad_mode):
    inputs = list(tensors())
    with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
        attend(*inputs)  # no tangents: nothing to refuse
        inputs[at] = forward_ad.make_dual(inputs[at], torch.ones_like(inputs[at]))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            attend(*inputs)


def test_tensors_without_data():
    query, key, value = (x.to("meta") for x in tensors(kv_heads=2, dtype=torch.float16))
    out, lse = dilated_attention(query, key, value, PATTERN, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (query.shape, torch.float16, (2, 4, 20), torch.float32)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_are_counted(is_causal):
    query, key, value = tensors(kv_heads=2, requires_grad=True)
    forward = Problem.of(query, key, PATTERN, is_causal=is_causal).flops()
    with FlopCounterMode(display=False) as counter:
        out = attend(query, key, value, is_causal=is_causal)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * forward // 2
