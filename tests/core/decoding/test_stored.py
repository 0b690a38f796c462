"""Rows that are stored in another dtype."""

import pytest
import torch
from torch import Tensor

from dilkit import DilatedCache, DilatedSegment, GlobalTokens, Pattern, SlidingWindow, Strided
from dilkit.decoding.layout import decoded, encoded
from dilkit.oracle import oracle_attention

MIX = Pattern.of(SlidingWindow(5), Strided(4), DilatedSegment(8, 2), GlobalTokens(3))


def rounded(x: Tensor, stored: str) -> Tensor:
    return decoded(encoded(x, getattr(torch, stored)), torch.float64)


@pytest.mark.parametrize("head_dim", [1, 5, 6, 7])
def test_a_scale_may_lie_anywhere_in_memory(head_dim):
    query, key, value = torch.randn(3, 1, 2, 1, head_dim).unbind()
    cache, steps = DilatedCache(Pattern([8], [1]), 1, stored="int8"), []
    for i in range(2):
        steps.append(cache.attend(query[:, i : i + 1], key[:, i : i + 1], value[:, i : i + 1], backend="reference"))
    right = oracle_attention(query, rounded(key, "int8"), rounded(value, "int8"), Pattern([8], [1]), is_causal=True)[0]
    torch.testing.assert_close(torch.cat(steps, 1).double(), right, atol=1e-5, rtol=1e-5)


def test_a_number_is_off_by_half_the_scale_at_most():
    x = torch.randn(500, 64) * torch.logspace(-30, 30, 500)[:, None]
    scale = x.abs().amax(-1, keepdim=True) / 127
    off = (decoded(encoded(x, torch.int8), torch.float64) - x.double()).abs()
    assert (off <= scale.double() * (0.5 + 1e-5)).all()  # and what float32 rounds a product by
    assert ((decoded(encoded(x, torch.bfloat16), torch.float64) - x.double()).abs() <= 2**-8 * x.double().abs()).all()


def test_numbers_that_are_not_finite_make_a_row_of_nan():
    x = torch.zeros(4, 5)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    back = decoded(encoded(x, torch.int8), torch.float32)
    assert back[1:3].isnan().all()
    assert (back[[0, 3]] == 0).all()


def test_a_batch_of_none():
    cache = DilatedCache(Pattern([4], [1]), 1, stored="int8")
    for count in (5, 1, 3):
        assert cache.attend(*(torch.zeros(0, count, 1, 4) for _ in range(3))).shape == (0, count, 1, 4)


@pytest.mark.parametrize(("stored", "share"), [("int8", 0.27), ("bfloat16", 0.5)])
def test_the_memory(stored, share):
    row, sizes = torch.randn(1, 40, 2, 64), []
    for kept in (None, stored):
        cache = DilatedCache(Pattern([32, 64], [1, 2]), 2, stored=kept)
        cache.attend(row, row, row)
        cache.attend(*[row[:, :9]] * 3)
        sizes.append((cache.nbytes, cache.allocated_nbytes))
    assert all(small <= share * plain for plain, small in zip(*sizes, strict=True))


@pytest.mark.parametrize("stored", ["int8", "bfloat16"])
def test_a_state_of_other_rows_is_refused(stored):
    rows, cache = torch.randn(3, 2, 20, 2, 10).unbind(), DilatedCache(MIX, 2, stored=stored)
    cache.attend(*rows)
    state = cache.state_dict()
    for other in (None, *({"int8", "bfloat16"} - {stored})):
        with pytest.raises(ValueError, match=rf"state is of a cache with stored={stored}, but this one has stored={other}"):
            DilatedCache(MIX, 2, stored=other).load_state_dict(state)
    for change in (dict(dtype="float64"), dict(dtype=3)):
        with pytest.raises((TypeError, ValueError), match="state: dtype="):
            DilatedCache(MIX, 2, stored=stored).load_state_dict(state | change)
    plain = DilatedCache(MIX, 2)
    plain.attend(*rows)
    with pytest.raises(ValueError, match="state is of a cache with stored=None"):
        cache.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("stored", "dtype", "error", "message"),
    [
        ("int4", "float32", ValueError, "stored='int4' is not known; choose from 'bfloat16', 'int8'"),
        (8, "float32", ValueError, "stored=8 is not known"),
        (
            "int8",
            "float64",
            TypeError,
            "query is torch.float64, but the cache has stored='int8', which is for float32, bfloat16, float16",
        ),
        ("bfloat16", "float16", TypeError, "stored='bfloat16', which is for float32"),
    ],
)
def test_what_is_stored_has_to_fit(stored, dtype, error, message):
    row = torch.zeros(1, 1, 2, 8, dtype=getattr(torch, dtype))
    with pytest.raises(error, match=message):
        DilatedCache(Pattern([4, 8, 16], [1, 2, 4]), 2, stored=stored).attend(row, row, row)
