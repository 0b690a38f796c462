"""Parts of dilkit.testing."""

from dataclasses import replace

import pytest
import torch
from helpers.measuring import SMALL

from dilkit import Pattern
from dilkit.checks import visible
from dilkit.oracle import oracle_attention
from dilkit.testing.accuracy import exact_rows, shortened
from dilkit.testing.poison import poisoned_memory
from dilkit.testing.tensors import Tensors


@pytest.mark.parametrize("options", [dict(kv_heads=2), dict(key_padding_mask=True), dict(key_padding_mask=True, is_causal=True)])
def test_rows_are_computed_as_the_oracle_does(options):
    problem = replace(SMALL, pattern=Pattern([16, 32], [2, 4]), dtype="float64", batch=2, **options)
    inputs, rows = Tensors.random(problem), torch.tensor([0, 3, 31, 63])
    flags = dict(is_causal=problem.is_causal, key_padding_mask=inputs.mask)
    out, lse = oracle_attention(inputs.query, inputs.key, inputs.value, problem.pattern, **flags)
    (dquery,) = torch.autograd.grad(out, inputs.query, inputs.dout)
    exact = dict(out=out[:, rows].detach(), lse=lse[:, :, rows].detach(), dq=dquery[:, rows])
    torch.testing.assert_close(exact_rows(problem, inputs, rows), exact, rtol=1e-12, atol=1e-12)


def test_tensors_of_a_seed_are_the_same_again():
    first, again, other = (Tensors.random(SMALL, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.query, again.query)
    assert not torch.equal(first.query, other.query)


def test_a_long_problem_is_shortened_with_its_segments():
    short = shortened(replace(SMALL, seq=16384, pattern=Pattern([2048, 16384, 10**9], [1, 8, 200])))
    assert (short.seq, short.pattern.segment_lengths, short.pattern.dilation_rates) == (512, (64, 512, 1600), (1, 8, 200))
    narrow = shortened(replace(SMALL, seq=1 << 20, pattern=Pattern([4, 512], [1, 2])))
    assert narrow.pattern.segment_lengths == (4, 16)
    assert shortened(SMALL) == SMALL


def test_poisoned_memory_may_be_a_leaf():
    with poisoned_memory():
        x = torch.empty(3, requires_grad=True)
        assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert x.isnan().all()
    assert x.requires_grad
    assert x.is_leaf


def test_visible_texts_are_one_line_and_printable():
    escapes = "\x1b]0;title\x07\x1b[31mred\r\n\u202egnp.exe\u2028\x00\ud800"
    assert visible(escapes) == "\\x1b]0;title\\x07\\x1b[31mred  \\u202egnp.exe \\x00\\ud800"
    assert visible("as it is, \u65e5\u672c") == "as it is, \u65e5\u672c"
    assert visible("abcdef", 3) == "abc..."
