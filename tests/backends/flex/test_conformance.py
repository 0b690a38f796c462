"""`flex` on the problem list, by the operators beneath FlexAttention on the CPU; and what it makes of forms, pair by pair.

Compiled, torch refuses gradients and `lse` on the CPU; the operators' dense form has both.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.calls import starts_of
from helpers.fakes import registered
from helpers.flex_on_cpu import FlexInClasses, FlexOnCpu
from helpers.strategies import mixes_with_heads
from hypothesis import given, settings, strategies as st
from torch.nn.attention import flex_attention

from dilkit import (
    BlockSparse,
    Device,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    Pattern,
    PatternError,
    Problem,
    RowTable,
    SlidingWindow,
    dilated_attention,
    dilated_attention_varlen,
    explain,
)
from dilkit.backends.flex.backend import Flex
from dilkit.backends.flex.call import flex_call, padded
from dilkit.inputs import Inputs
from dilkit.oracle import oracle_attention
from dilkit.pattern.flex.blocks import BLOCK, blocks_of
from dilkit.pattern.flex.class_order import class_rate
from dilkit.pattern.flex.pairs import MOST_INTERVALS, counter
from dilkit.pattern.lowering import lower
from dilkit.testing.conformance import check
from dilkit.testing.packings import SEQUENCES
from dilkit.testing.problems import GIVEN_BLOCKS, OTHER_KINDS, PROBLEMS, SCORES

CPU = torch.device("cpu")

PACKED = [case for case in SEQUENCES if not case.variant.startswith("random")]
"""Each sequence is a call of its own, which torch traces for long: random lengths show no more."""
LISTED = [
    case for case in (*PROBLEMS, *PACKED, *OTHER_KINDS, *GIVEN_BLOCKS, *SCORES) if case.dtype != "float64" and not case.rows
]
IN_CLASSES = [
    case
    for case in LISTED
    if case.mask == case.bias == "none"
    and not (case.lengths or case.queries)
    and class_rate(lower(case.pattern, case.seq, case.heads, case.kv_heads), case.seq, least=1) > 1
]
RUNS = [(FlexOnCpu, case, number % 61 == 7) for number, case in enumerate(LISTED)]
RUNS += [(FlexInClasses, case, number % 31 == 3) for number, case in enumerate(IN_CLASSES)]
"""With each, True if it is one of the few by default."""


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(backend, case, marks=[pytest.mark.slow] * (not usual), id=f"{backend.name}-{case.name}")
        for backend, case, usual in RUNS
    ],
)
def test_results_and_gradients_are_right_or_refused(backend, case):
    """But gradients of weights that the dense operators, other than a generated kernel, would sum in half precision."""
    in_half = case.bias != "none" and case.dtype != "float32"
    with registered(backend()) as name:
        result = check(name, replace(case, gradients=False) if in_half else case)
    if result.verdict == "refused":
        pytest.skip("; ".join(result.reasons))
    assert result.verdict == "passed", (result.reasons, result.ratios)


@given(drawn=mixes_with_heads(), seq=st.integers(1, 80))
@settings(max_examples=25)
def test_pairs_are_those_of_the_count(drawn, seq):
    pattern, (heads, kv_heads) = drawn
    try:
        problem = Problem(pattern=pattern, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=8)
    except PatternError:  # of another number of tokens
        return
    if "unlowered" in problem.forms.names:
        return
    h, i, j = torch.meshgrid(torch.arange(heads), torch.arange(seq), torch.arange(seq), indexing="ij")
    assert torch.equal(counter(problem.forms, seq, CPU)(h, i, j), pattern.count(seq, heads, kv_heads=kv_heads).to(torch.int32))


@given(
    drawn=st.sampled_from(
        [
            Pattern([100, 256, 512], [1, 2, 4]),
            Pattern.of(SlidingWindow(200), GlobalTokens([3, 300, 301])),
            Pattern.of(SlidingWindow(400, 3)),
            Pattern.of(BlockSparse.bigbird(8, 64, heads=2)),
            Pattern.of(BlockSparse.local_global(4, 128)),
            Pattern.of(Intervals([max(i - 300, 0) for i in range(512)], [i + 3 for i in range(512)])),
            Pattern.natten((16, 32), (4, 7), (2, 1), stride=(3, 2), causal=(True, False)),
            Pattern.of(Neighborhood((16, 32), (5, 7), (4, 9), border="cut")),
            Pattern.of(SlidingWindow(60), BlockSparse.local_global(4, 128), overlap="once"),
        ]
    ),
    is_causal=st.booleans(),
)
@settings(max_examples=16)
def test_blocks_hold_every_pair_and_whole_ones_nothing_else(drawn, is_causal):
    some, whole = blocks_of(Problem(pattern=drawn, seq=512, heads=2, head_dim=8).forms, 512, 2, is_causal)
    seen = drawn.count(512, 2, is_causal=is_causal).numpy() > 0
    blocks = seen.reshape(2, 512 // BLOCK, BLOCK, 512 // BLOCK, BLOCK)
    assert np.all(some.numpy() >= blocks.any((2, 4)))
    assert np.all(whole.numpy() <= blocks.all((2, 4)))
    assert np.all(whole.numpy() <= some.numpy())


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("lengths", [(), (300, 0, 129)])
@pytest.mark.parametrize("pattern", [Pattern.dense(), Pattern.of(SlidingWindow(150)), Pattern([64, 256], [1, 2])], ids=str)
def test_what_is_not_asked_pair_by_pair_is_seen(pattern, lengths, mask):
    """FlexAttention skips unlisted blocks and asks for no pair of whole ones; dense operators ask for all."""
    from torch.nn.attention.flex_attention import create_mask

    if lengths and mask:
        return  # packed sequences have no mask
    seq, ignored = 429, torch.rand(2, 429) < 0.3
    x = torch.randn(1 if lengths else 2, seq, 2, 16)
    starts = starts_of(lengths) if lengths else None
    problem = Problem.of(x, x, pattern, varlen=bool(lengths), key_padding_mask=mask, is_causal=True)
    inputs = Inputs(x, x, x, key_padding_mask=ignored if mask else None, cu_seqlens=starts)
    blocks = flex_call(inputs, problem).block_mask
    count = padded(seq) // BLOCK
    seen = create_mask(blocks.mask_mod, len(x), 2, padded(seq), padded(seq), "cpu")
    cells = seen.unflatten(3, (count, BLOCK)).unflatten(2, (count, BLOCK)).transpose(3, 4).flatten(4)
    for head in range(2):
        for row in range(count):
            some, whole = (
                set(indices[0, head, row, : int(number[0, head, row])].tolist())
                for number, indices in (
                    (blocks.kv_num_blocks, blocks.kv_indices),
                    (blocks.full_kv_num_blocks, blocks.full_kv_indices),
                )
            )
            own = cells[:, head, row]
            assert all(own[:, column].all() for column in whole)
            assert not any(own[:, column].any() for column in set(range(count)) - some - whole)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_masks_of_a_pattern_are_those_that_torch_makes_of_its_count(is_causal):
    seq, heads, sizes = 300, 2, dict(kv_heads=1, is_causal=is_causal)
    for pattern in (Pattern([64, 256], [1, 4]), Pattern.of(SlidingWindow(before=40, after=3), Documents([128, 172]))):
        count = pattern.count(seq, heads, **sizes)
        h, i, j = torch.meshgrid(torch.arange(heads), torch.arange(seq), torch.arange(seq), indexing="ij")
        assert torch.equal(pattern.mask_mod(seq, heads, **sizes)(h * 0, h, i, j), count > 0)
        scores = pattern.score_mod(seq, heads, **sizes)(torch.zeros(h.shape), h * 0, h, i, j)
        assert torch.equal(scores[count > 0], count[count > 0].log())
        made = flex_attention.create_block_mask(pattern.mask_mod(seq, heads, **sizes), None, heads, seq, seq, device="cpu")
        mine = pattern.block_mask(seq, heads, **sizes)
        for of_mine, of_torch in ((mine.kv_num_blocks, made.kv_num_blocks), (mine.full_kv_num_blocks, made.full_kv_num_blocks)):
            assert torch.equal(of_mine + 0, of_torch)
    assert Pattern.dense().score_mod(seq, heads) is None
    for refused in (Pattern.of(BlockSparse(None, 8)), Pattern([8], [2], tail="zeros")):
        with pytest.raises(PatternError, match="mask"):
            refused.block_mask(seq, heads)


def test_rows_of_many_runs_are_looked_up_in_a_table():
    layout = torch.zeros(1, 40, 40, dtype=torch.bool)
    layout[0, :, ::3] = True
    problem = Problem(pattern=Pattern.of(BlockSparse(layout, 2)), seq=77, heads=1, head_dim=8)
    assert problem.forms[0].queries.runs.max() > MOST_INTERVALS
    i, j = torch.meshgrid(torch.arange(77), torch.arange(77), indexing="ij")
    assert torch.equal(counter(problem.forms, 77, CPU)(i * 0, i, j), problem.pattern.count(77, 1)[0].to(torch.int32))


def test_lengths_are_padded_to_few():
    lengths = range(1, 40_000)
    assert all(seq <= padded(seq) < seq + max(BLOCK, seq // 4) and padded(seq) % BLOCK == 0 for seq in lengths)
    assert len({padded(seq) for seq in lengths}) < 80


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is no g++ here")
def test_compiled_it_is_right_and_new_lengths_compile_nothing():
    """Forward alone, and without `lse`: more is not compiled for CPUs."""
    pattern, flex = Pattern.of(SlidingWindow(180), GlobalTokens(2)), FlexOnCpu()

    @torch.compile(fullgraph=True, dynamic=False)
    def attend(q, k, v, of_weights, weights, block_mask):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, of_weights(weights), block_mask)

    for seq in (200, 187, 250):
        q, k, v = torch.randn(3, 1, seq, 2, 16).unbind()
        ignored = torch.rand(1, seq) < 0.3
        problem = Problem.of(q, k, pattern, key_padding_mask=True)
        assert not flex.refusals(problem)
        with torch._dynamo.config.patch(error_on_recompile=seq != 200):
            out = attend(*flex_call(Inputs(q, k, v, ignored), problem)[:6])[:, :, :seq].transpose(1, 2)
        torch.testing.assert_close(
            out.double(), oracle_attention(q, k, v, pattern, key_padding_mask=ignored)[0], rtol=1e-5, atol=1e-5
        )


def test_it_is_chosen_where_kernels_of_ours_and_torchs_refuse():
    device = Device.assume("sm_80")
    problem = Problem(pattern=Pattern.natten((32, 32), 7), seq=1024, heads=4, head_dim=64, device=device, dtype="bfloat16")
    verdicts = {decision.name: decision.verdict for decision in explain(problem).decisions}
    able = [name for name in ("cupy_raw", "triton", "sdpa", "numba_cuda") if verdicts.get(name) in ("picked", "able")]
    assert not able
    reasons = " ".join(map(str, Flex().refusals(problem)))
    assert not reasons.replace("module triton: not installed (pip install triton)", "")


@pytest.mark.parametrize("packed", [False, True])
def test_values_by_query_have_gradients_of_the_rows_of_the_call(packed):
    """Rows are padded to whole blocks, of which gradients show nothing."""
    torch.manual_seed(0)
    q, values = torch.randn(1, 70, 2, 16, requires_grad=True), torch.randn(1, 2, 70, 5, requires_grad=True)
    found, starts = [], torch.tensor([0, 30, 70], dtype=torch.int32)
    with registered(FlexOnCpu()) as name:
        for backend in (name, "reference"):
            options = dict(bias=RowTable(values), backend=backend)
            if packed:
                out = dilated_attention_varlen(q[0], q[0], q[0], Pattern.mistral(9), starts, **options)
            else:
                out = dilated_attention(q, q, q, Pattern.mistral(9), **options)
            found.append(torch.autograd.grad(out.sin().sum(), (q, values)))
    torch.testing.assert_close(*found)
