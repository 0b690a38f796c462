"""The weights of attention."""

import pytest
import torch
from helpers.live_bytes import LiveBytes
from helpers.pairwise import diagonal, every_pair

from dilkit import DilatedSegment, GlobalTokens, Pattern, SlidingWindow, attention_mass, attention_rows
from dilkit.oracle import oracle_attention

pytestmark = pytest.mark.surroundings

SEQ = 22
PATTERNS = (
    Pattern([4, 8], [1, 2]),
    Pattern([4, 8, 16], [1, 2, 4], offset="block", tail="zeros"),
    Pattern([4, 8], [1, 2], overlap="once"),
    Pattern([4, 8], [2, 4], heads=[(0, 2), (1, 3)]),
    Pattern([4, 8], [2, 4], offset="block", head_shard=(2, 7)),
    Pattern.dense(),
    Pattern.of(DilatedSegment(16, 4), SlidingWindow(3), GlobalTokens(2)),
)
"""The fourth leaves rows and a head that see nothing."""
CALLS = (
    dict(),
    dict(is_causal=True),
    dict(scale=0.3, key_padding_mask=torch.arange(SEQ).remainder(5).eq(1).expand(2, -1)),
    dict(kv_heads=2, sink=torch.tensor([0.5, -1.0, 3.0, -9.0], dtype=torch.float64)),
    dict(kv_heads=1, dim=2),
)
"""The last has more query heads to a key/value head than columns."""


def drawn(kv_heads=4, dim=6, **options):
    torch.manual_seed(0)
    query, key = torch.randn(2, SEQ, 4, dim).double(), torch.randn(2, SEQ, kv_heads, dim).double()
    if "key_padding_mask" in options:
        key[options["key_padding_mask"]] = float("nan")
    return query, key, options


def all_weights(query, key, pattern, options):
    unit = torch.eye(SEQ, dtype=torch.float64)[None, :, None].expand(2, SEQ, key.shape[2], SEQ)
    return oracle_attention(query, key, unit, pattern, **options)[0].transpose(1, 2)


BOTH = every_pair((None, "sdpa", "reference"), PATTERNS, CALLS)


@pytest.mark.parametrize(
    ("backend", "pattern", "call"), [one for one in BOTH if (one.values[0], one.values[1].overlap) != ("sdpa", "once")], ids=str
)
def test_mass_is_the_sum_of_columns(backend, pattern, call):
    query, key, options = drawn(**call)
    right = all_weights(query, key, pattern, options).sum(dim=2)
    found = attention_mass(query, key, pattern, backend=backend, **options)
    assert found.shape == (2, 4, SEQ)
    assert (found - right).abs().max() <= 1e-12


@pytest.mark.parametrize(("pattern", "call"), diagonal(PATTERNS, CALLS), ids=str)
def test_rows_are_those_of_the_matrix(pattern, call):
    query, key, options = drawn(**call)
    rows = [21, 0, 5, 5]
    found = attention_rows(query, key, pattern, rows, **options)
    assert (found - all_weights(query, key, pattern, options)[:, :, rows]).abs().max() <= 1e-13


@pytest.mark.parametrize("kv_heads", [3, 9, 20])
def test_mass_of_any_number_of_heads(kv_heads):
    """Groups are unequal: the first branch serves none of some, and no branch serves the last head."""
    torch.manual_seed(0)
    heads = 2 * kv_heads
    query, key = torch.randn(2, SEQ, heads, 6).double(), torch.randn(2, SEQ, kv_heads, 6).double()
    pattern = Pattern([4, 8], [2, 3], heads=[(3, kv_heads + 1), (1, heads - 1)], tail="zeros")
    sink = torch.randn(heads, requires_grad=True)
    found = attention_mass(query, key.requires_grad_(), pattern, sink=sink)
    assert not found.requires_grad
    right = all_weights(query, key.detach(), pattern, dict(sink=sink.detach().double())).sum(dim=2)
    assert (found - right).abs().max() <= 1e-12


SIZES = [(torch.float32, 1.0), (torch.bfloat16, 2.0)]
"""And how many results of `dilated_attention` the mass may take. At two lengths: linear in them."""


def long_inputs(dtype, seq):
    query, key = torch.randn(2, 1, seq, 8, 48).to(dtype).unbind()
    return query, key, Pattern([64, 2 * seq], [1, 1024], offset="block", tail="zeros")


@pytest.mark.parametrize(("dtype", "limit"), SIZES)
@pytest.mark.parametrize("seq", [1024, 4096])
def test_tensors_of_mass_take_less_memory_than_two_results(dtype, limit, seq):
    query, key, pattern = long_inputs(dtype, seq)
    with LiveBytes(query, key) as tensors:
        attention_mass(query, key, pattern)
    assert tensors.peak <= limit * query.nbytes


def test_rows_have_gradients():
    query, key, _ = drawn()
    query.requires_grad_()
    attention_rows(query, key, PATTERNS[1], torch.tensor([20]))[..., 3].sum().backward()
    (right,) = torch.autograd.grad(all_weights(query, key, PATTERNS[1], {})[:, :, 20, 3].sum(), query)
    assert (query.grad - right).abs().max() <= 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_wide(dtype):
    query, key, _ = drawn()
    query, key = query.to(dtype), key.to(dtype)
    right = all_weights(query.double(), key.double(), PATTERNS[1], {})
    mass, rows = attention_mass(query, key, PATTERNS[1]), attention_rows(query, key, PATTERNS[1], [9])
    assert mass.dtype == rows.dtype == torch.float32
    assert (mass - right.sum(dim=2)).abs().max() <= 1e-5
    assert (rows[:, :, 0] - right[:, :, 9]).abs().max() <= 1e-6


def test_an_autocast_takes_nothing_away():
    query, key = (x.float() for x in drawn()[:2])
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_mass(query, key, PATTERNS[0]), attention_rows(query, key, PATTERNS[0], [3, 9])
        mixed = attention_mass(query.bfloat16(), key, PATTERNS[0]), attention_rows(query, key.bfloat16(), PATTERNS[0], [3])
    expected = attention_mass(query, key, PATTERNS[0]), attention_rows(query, key, PATTERNS[0], [3, 9])
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)  # and of its dtype
    assert {x.dtype for x in mixed} == {torch.float32}
