"""bf16 on the CPU kernel."""

import pytest
import torch

from dilkit import Pattern, Problem, SlidingWindow, Strided, dilated_attention
from dilkit.backends.native import _native
from dilkit.backends.native.backend import Native, _encode
from dilkit.environment import BF16_SETS
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

SETS = _native.instruction_sets()
OF_PAIRS = [name for name in SETS if name in BF16_SETS] or [
    pytest.param("none", marks=pytest.mark.skip(reason="this machine computes no products of bf16 pairs"))
]
WINDOW = Pattern.of(SlidingWindow(50, 2), Strided(9, heads=(1, 2)))
CASES = {
    "odd head_dim": dict(pattern=Pattern([64, 130], [1, 3]), heads=2, kv_heads=1, head_dim=75, is_causal=True, batch=1),
    "scores": dict(pattern=Pattern.dense(), heads=1, head_dim=40, bias="alibi", softcap=5.0, dropout_p=0.2, is_causal=True),
    "packed": dict(pattern=WINDOW, heads=2, head_dim=48, batch=1, lengths=(0, 13, 131, 1)),
    "hidden NaN": dict(pattern=Pattern([50], [1]), heads=1, head_dim=33, mask="random", values="ignored NaN"),
}
PROBLEM = Problem(pattern=Pattern.dense(), seq=8, heads=1, head_dim=8, dtype="bfloat16")


@pytest.mark.parametrize("isa", OF_PAIRS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_the_oracle(isa, name, monkeypatch):
    monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    fields = dict(seq=sum(CASES[name].get("lengths", ())) or 131, dtype="bfloat16") | CASES[name]
    result = check("native", Case(feature="pairs", variant=name, **fields))
    assert result.verdict == "passed", "; ".join(result.reasons)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("seq", [1, 13, 35, 53])
def test_rows_that_a_tile_lacks_leave_gradients_as_they_are(isa, seq, monkeypatch):
    """All scores are -160: a row of zeros instead would have the weight e**160."""
    monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    query = torch.full((1, seq, 1, 16), 4.0, dtype=torch.bfloat16).requires_grad_()
    key = torch.full((1, seq, 1, 16), -10.0, dtype=torch.bfloat16).requires_grad_()
    value = torch.arange(seq, dtype=torch.bfloat16).view(1, seq, 1, 1).repeat(1, 1, 1, 16)
    out = dilated_attention(query, key, value, Pattern.dense(), backend="native")
    dquery, dkey = torch.autograd.grad(out.float().sum(), (query, key))
    assert torch.allclose(out.float(), torch.tensor((seq - 1) / 2), rtol=4e-3)
    assert torch.isfinite(dkey).all()
    scale = 10 * value.abs().max() * 16  # of what cancels in the sum over the keys
    assert dquery.abs().max() <= 4e-3 * scale, "equal keys have no gradient for a query"


@pytest.mark.parametrize("isa", SETS)
def test_what_memory_held_before_stays_out_of_gradients(isa, monkeypatch):
    """A sequence of infinities leaves scratch to one of less than a tile of rows."""
    monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    for seq, number in ((64, torch.inf), (9, 1.0)):
        x = torch.full((1, seq, 1, 64), number, dtype=torch.bfloat16).requires_grad_()
        out = dilated_attention(x, x, x, Pattern.dense(), backend="native")
        (gradient,) = torch.autograd.grad(out.float().sum(), x)
    assert torch.isfinite(gradient).all()


def test_sets_whose_products_of_pairs_are_slow_come_last(monkeypatch):
    monkeypatch.delenv("DILKIT_CPU_ISA", raising=False)
    built = _native.built_for()
    monkeypatch.setattr(_native, "is_slow", lambda i: built[i] == SETS[0])
    ordered = _native.instruction_sets.__wrapped__()
    assert ordered[-1] == SETS[0]
    assert sorted(ordered) == sorted(SETS)
    monkeypatch.setattr("dilkit.backends.native.backend._instruction_sets", lambda: ordered)
    assert Native().detail(PROBLEM) == ordered[0]


def test_a_set_that_is_named_is_taken_however_slow(monkeypatch):
    for name in SETS:
        monkeypatch.setenv("DILKIT_CPU_ISA", name)
        assert Native().detail(PROBLEM) == name


def test_gradients_are_summed_up_in_fp32_or_refused():
    x = torch.randn(1, 8, 1, 8).bfloat16()
    *sums, _ = _native.backward(_encode(PROBLEM), SETS[0], 1, x, x, x, x, x, torch.zeros(1, 1, 8), None)
    assert {total.dtype for total in sums} == {torch.float32}
    with pytest.raises(TypeError, match=r"lse is torch.bfloat16, in which the kernel would sum gradients up"):
        _native.backward(_encode(PROBLEM), SETS[0], 1, x, x, x, x, x, torch.zeros(1, 1, 8).bfloat16(), None)
