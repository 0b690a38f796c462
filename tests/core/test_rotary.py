"""Rotary positions against the formula in complex numbers, and what they are for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dilkit import plan
from dilkit.rotary import rotary_embedding


@pytest.fixture(autouse=True)
def _fresh_cache():
    plan.cache_clear()
    yield
    plan.cache_clear()


def by_definition(x, positions, base=10000.0):
    """Each pair as a complex number times exp(i p t), in fp64; `positions` `(batch, seq)`."""
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones((), dtype=torch.float64), positions.double()[:, :, None, None] * theta)
    z = torch.complex(x.double()[..., :half], x.double()[..., half:]) * turns
    return torch.cat((z.real, z.imag), dim=-1)


def sample(batch=2, seq=9, heads=3, head_dim=8, dtype=torch.float32):
    return torch.randn(batch, seq, heads, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("base", [10000.0, 500])
def test_it_is_the_formula(dtype, tolerance, base):
    x = sample(dtype=dtype)
    out = rotary_embedding(x, base=base)
    assert out.dtype == dtype
    assert out.shape == x.shape
    torch.testing.assert_close(out.double(), by_definition(x, torch.arange(9).expand(2, 9), base), atol=tolerance, rtol=0)


def test_positions_may_differ_by_batch_and_be_any_integers():
    x = sample()
    positions = torch.tensor([[5, 3, 1, 0, -2, 7, 7, 100, 1000], list(range(9))], dtype=torch.int32)
    torch.testing.assert_close(rotary_embedding(x, positions).double(), by_definition(x, positions), atol=1e-6, rtol=0)


def test_a_million_tokens_in_lose_no_accuracy():
    x, positions = sample(), torch.arange(1_000_000, 1_000_009)
    expected = by_definition(x, positions.expand(2, 9))
    torch.testing.assert_close(rotary_embedding(x, positions).double(), expected, atol=1e-6, rtol=0)


def test_gradients():
    x = sample(batch=1, seq=3, heads=2, head_dim=4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(rotary_embedding, x)


def test_tables_are_made_once():
    x = sample()
    rotary_embedding(x)
    rotary_embedding(x * 2)
    assert plan.cache_info()[:3] == (1, 1, 1)
    rotary_embedding(x, base=20000.0)
    rotary_embedding(x.double())
    assert plan.cache_info().entries == 3


def test_a_table_made_in_inference_mode_serves_training_later():
    x = sample()
    with torch.inference_mode():
        rotary_embedding(x)
    x.requires_grad_()
    rotary_embedding(x).sum().backward()
    assert plan.cache_info().hits == 1
    assert x.grad is not None


def test_stand_ins_never_enter_the_cache():
    x = sample()
    with FakeTensorMode():
        rotary_embedding(torch.empty(2, 9, 3, 8))
    torch.func.grad(lambda x: rotary_embedding(x).sum())(x)
    assert plan.cache_info().entries == 0
    mapped = torch.func.vmap(rotary_embedding)(x.unsqueeze(0))
    assert torch.equal(mapped[0], rotary_embedding(x))
