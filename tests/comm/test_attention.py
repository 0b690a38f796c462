"""Dilated attention over ranks as threads."""

import random
import zlib
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from helpers.backends_here import on
from helpers.pairwise import all_but, diagonal, every_pair
from helpers.ranks import PATTERN, TURNS, assert_counted, assert_right, even_cuts, of_case, uneven_cuts
from helpers.strategies import patterns_with_heads
from hypothesis import given, settings, strategies as st

from dilkit import DilatedSegment, Pattern, SlidingWindow, TokenOrder, use_backend
from dilkit.comm import ring_dilated_attention, run_threads, shard_cuts
from dilkit.oracle import oracle_attention
from dilkit.problem import DTYPES
from dilkit.testing.conformance import _decide
from dilkit.testing.poison import poisoned_memory
from dilkit.testing.problems import PROBLEMS, Case
from dilkit.testing.tensors import make_tensors

pytestmark = pytest.mark.usefixtures("on_one_core")

SCHEDULES = ("auto", "scatter", "gather", "ring")
EACH_SCHEDULE = pytest.mark.parametrize("schedule", all_but(["scatter", "gather"], SCHEDULES))  # "auto" chooses one of the two
CASE = Case(feature="over ranks", variant="plain", pattern=PATTERN, seq=101)
ABLE = on("cpu")


def _drawn(case, backend):
    draw = random.Random(zlib.crc32(f"{case.name} {backend}".encode()))
    world_size = min(draw.randint(2, 8), case.seq)
    joint = case.pattern.overlap == "once" and len(case.pattern.branches) > 1
    cuts = draw.choice([even_cuts, uneven_cuts, uneven_cuts, lambda n, p: shard_cuts(n, p, case.pattern)])(case.seq, world_size)
    schedule = draw.choice(("auto", "balanced", "scatter") if joint else (*SCHEDULES, "balanced"))
    fuse = schedule in ("gather", "ring") or world_size == 1 or draw.random() < 0.6
    return cuts, dict(schedule=schedule, fuse_branches=fuse)


LIST = [case for at, case in enumerate(PROBLEMS) if case.feature == "mix" or at % len(DTYPES) == at // len(DTYPES) % len(DTYPES)]


def able_backends(case):
    return [name for name in ABLE if _decide(name, case, "cpu", case.gradients).verdict == "picked"]


def first_of_six(at, case):
    return pytest.param(at, case, marks=[pytest.mark.slow] if at % 6 else [])


@pytest.mark.parametrize(("at", "case"), [first_of_six(at, case) for at, case in enumerate(LIST)], ids=[c.name for c in LIST])
def test_problem_list_over_ranks(at, case):
    able = able_backends(case)
    backend = able[at % len(able)]
    cuts, options = _drawn(case, backend)
    with poisoned_memory():
        found = of_case(case, cuts, backend=backend, **options)
    assert_right(case, found)
    assert_counted(found, make_tensors(case))


@pytest.mark.parametrize(("backend", "schedule", "dtype", "world_size"), every_pair(ABLE, SCHEDULES, DTYPES, (4, 5)))
def test_every_schedule_and_dtype(backend, schedule, dtype, world_size):
    case = replace(CASE, dtype=dtype, is_causal=world_size == 5, mask="random", kv_heads=2)
    found = of_case(case, uneven_cuts(case.seq, world_size), schedule=schedule, backend=backend)
    assert_right(case, found)
    assert_counted(found, make_tensors(case))


@pytest.mark.smoke
@pytest.mark.parametrize("seq", all_but([8, 9, 23, 25, 96, 98], [7, 8, 9, 23, 24, 25, 96, 97, 98]))
def test_odd_lengths_and_segments_that_end_beside_a_shard(seq):
    for is_causal, schedule in ((False, "auto"), (True, "ring"), (True, "gather")):
        case = replace(CASE, seq=seq, variant=str(seq), is_causal=is_causal, mask="random")
        assert_right(case, of_case(case, uneven_cuts(seq, min(seq, 6), seed=1), schedule=schedule))


@pytest.mark.parametrize(("mask", "schedule"), diagonal(("left", "right", "element", "all"), SCHEDULES))
def test_rows_that_see_nothing(mask, schedule):
    case = replace(CASE, mask=mask, is_causal=True, pattern=Pattern([16, 101], [4, 7]))
    found = of_case(case, uneven_cuts(case.seq, 4), schedule=schedule)
    assert_right(case, found)
    unseen = found.results["lse"] == -torch.inf
    assert unseen.any()
    assert not found.results["dq"].transpose(1, 2)[unseen].any()


@pytest.mark.parametrize("backend", ["native", "reference"])
@EACH_SCHEDULE
def test_large_scores_where_shards_differ_in_length(backend, schedule):
    """Problems with more keys than queries are filled up: what stands in must not overflow.

    Not with sdpa: such scores leave it few digits, on one rank alone as well.
    """
    case = replace(CASE, values="large key", scale=1e-2, mask="random", variant="large")
    found = of_case(case, uneven_cuts(case.seq, 3), schedule=schedule, backend=backend)
    assert (found.results["lse"].abs() > 100).any()
    assert_right(case, found)


@TURNS
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_anything(turn, data):
    pattern, (heads, kv_heads) = data.draw(patterns_with_heads())
    world_size = data.draw(st.integers(1, 8))
    seq = data.draw(st.integers(world_size, 50))
    cuts = uneven_cuts(seq, world_size, data.draw(st.integers(0, 99)))
    joint = pattern.overlap == "once" and len(pattern.branches) > 1
    schedule = data.draw(st.sampled_from(("auto", "balanced", "scatter") if joint else (*SCHEDULES, "balanced")))
    fuse = schedule in ("gather", "ring") or data.draw(st.booleans())
    sizes = dict(seq=seq, heads=heads, kv_heads=kv_heads, head_dim=data.draw(st.sampled_from([1, 4, 9])))
    flags = dict(is_causal=data.draw(st.booleans()), mask=data.draw(st.sampled_from(["none", "random"])))
    case = Case(feature="any", variant=str(sizes), pattern=pattern, dtype=data.draw(st.sampled_from(DTYPES)), **sizes, **flags)
    found = of_case(case, cuts, schedule=schedule, fuse_branches=fuse)
    assert_right(case, found, slack=4)
    assert_counted(found, make_tensors(case))


CHOSEN = ("native", "float32"), ("sdpa", "bfloat16")
"""Backends and dtypes differ in kernels, not in how ranks call them: by default one pair for each."""


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [pytest.param(*one, marks=[] if one in CHOSEN else pytest.mark.slow) for one in product(ABLE, DTYPES)],
)
def test_branches_one_by_one_give_the_same_bits_for_every_world_size(backend, dtype):
    small = replace(CASE, dtype=dtype, is_causal=True, kv_heads=2)
    # Many segments: how a backend cuts up its work may depend on how many problems it is given at once.
    many = replace(CASE, dtype=dtype, seq=256, heads=8, batch=1, pattern=Pattern([32, 64, 256], [1, 2, 8]))
    kinds = replace(small, pattern=Pattern.of(SlidingWindow(7), DilatedSegment(16, 2)))
    for case in (small, replace(small, is_causal=False, mask="random"), many, kinds):
        one = of_case(case, (0, case.seq), backend=backend, fuse_branches=False)
        assert_right(case, one)
        for world_size in (3, 8):
            cuts = uneven_cuts(case.seq, world_size) if world_size % 2 else even_cuts(case.seq, world_size)
            found = of_case(case, cuts, backend=backend, fuse_branches=False)
            for name, x in one.results.items():
                assert torch.equal(found.results[name], x), f"{name} differs for {world_size} ranks"


DENSE_TOO = Pattern([24, 97], [1, 5])
"""Every row sees a key: its lse is a number."""


def on_ranks(world_size, function, **options):
    cuts = even_cuts(CASE.seq, world_size)
    return run_threads(world_size, lambda comm: function(comm, slice(*cuts[comm.rank : comm.rank + 2])), timeout=20, **options)


def _qkv(**options):
    return [torch.randn(2, CASE.seq, 4, 8, **options) for _ in range(3)]


@EACH_SCHEDULE
def test_without_lse_there_is_out_alone_and_without_gradients_nothing_is_recorded(schedule):
    qkv = _qkv()

    def attend(comm, rows):
        shards = [x[:, rows].requires_grad_() for x in qkv]
        with torch.no_grad():
            silent = ring_dilated_attention(*shards, PATTERN, comm, schedule=schedule)
        out, lse = ring_dilated_attention(*shards, PATTERN, comm, schedule=schedule, return_lse=True)
        assert torch.equal(out, silent)
        assert out.requires_grad
        assert not silent.requires_grad
        assert lse.requires_grad
        assert out.is_contiguous()

    on_ranks(3, attend)


@EACH_SCHEDULE
def test_gradients_through_lse_on_one_rank_alone(schedule):
    qkv, weight = [x.double() for x in _qkv()], torch.randn(2, 4, CASE.seq, dtype=torch.float64)
    first, last = even_cuts(CASE.seq, 3)[1:3]
    weight[:, :, :first], weight[:, :, last:] = 0.0, 0.0

    def attend(comm, rows):
        shards = [x[:, rows].clone().requires_grad_() for x in qkv]
        out, lse = ring_dilated_attention(*shards, DENSE_TOO, comm, is_causal=True, schedule=schedule, return_lse=True)
        (out.square().sum() + ((weight[:, :, rows] * lse).sum() if comm.rank == 1 else 0)).backward()
        return [x.grad for x in shards]

    whole = [x.clone().requires_grad_() for x in qkv]
    out, lse = oracle_attention(*whole, DENSE_TOO, is_causal=True)
    (out.square().sum() + (weight * lse).sum()).backward()
    for grads, x in zip(zip(*on_ranks(3, attend), strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(grads, 1), x.grad)


@pytest.mark.parametrize(
    ("dtype", "low", "computed"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        pytest.param(torch.float32, torch.float16, torch.float16, marks=pytest.mark.slow),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
    ids=str,
)
@EACH_SCHEDULE
def test_autocast_computes_in_its_dtype(dtype, low, computed, schedule):
    qkv = _qkv(dtype=dtype)

    def attend(comm, rows):
        shards = [x[:, rows].requires_grad_() for x in qkv]
        with torch.autocast("cpu", dtype=low):
            out = ring_dilated_attention(*shards, PATTERN, comm, schedule=schedule)
            grads = torch.autograd.grad(out.float().square().sum(), shards)
        lower = [x.detach().to(computed).requires_grad_() for x in shards]
        expected = ring_dilated_attention(*lower, PATTERN, comm, schedule=schedule)
        wanted = torch.autograd.grad(expected.float().square().sum(), lower)
        assert out.dtype == computed
        assert torch.equal(out, expected)
        for grad, want in zip(grads, wanted, strict=True):
            assert grad.dtype == dtype
            assert torch.equal(grad, want.to(dtype))

    on_ranks(3, attend)


@EACH_SCHEDULE
def test_the_backward_pass_uses_the_backend_of_the_forward_pass(schedule):
    """Gradients of another backend would not be reproducible."""
    qkv = _qkv()

    def attend(comm, rows):
        found = []
        for inside in (True, False):
            shards = [x[:, rows].requires_grad_() for x in qkv]
            with use_backend("reference"):
                out = ring_dilated_attention(*shards, PATTERN, comm, schedule=schedule)
                if inside:
                    found.append(torch.autograd.grad(out.sum(), shards))
            if not inside:
                found.append(torch.autograd.grad(out.sum(), shards))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    on_ranks(3, attend)


def test_gradients_add_up_over_calls_whose_backward_passes_come_in_another_order():
    qkv = _qkv(dtype=torch.float64)

    def attend(comm, rows):
        shards = [x[:, rows].requires_grad_() for x in qkv]
        once = [ring_dilated_attention(*shards, PATTERN, comm, schedule=schedule) for schedule in ("scatter", "ring")]
        for out in once:  # the first call first, against autograd's own order
            out.square().sum().backward(retain_graph=True)
        added = [x.grad.clone() for x in shards]
        for x in shards:
            x.grad = None
        sum(out.square().sum() for out in once).backward()
        torch.testing.assert_close([x.grad for x in shards], added)

    on_ranks(3, attend)


@pytest.mark.parametrize("order", [None, TokenOrder.from_permutation(range(CASE.seq)[::-1])], ids=["", "along an order"])
@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["sum", "squares"])
def test_double_backward_is_refused(loss, order):
    qkv = _qkv()

    def attend(comm, rows):
        shards = [x[:, rows].requires_grad_() for x in qkv]
        out = ring_dilated_attention(*shards, PATTERN, comm, order=order)
        (grad,) = torch.autograd.grad(loss(out), shards[:1], create_graph=True)
        whole = grad.square().sum() + shards[0].square().sum()
        again = partial(torch.autograd.grad, whole, shards[0])
        for differentiate in (whole.backward, partial(whole.backward, inputs=shards[:1]), again):
            with pytest.raises(RuntimeError, match="over ranks can be differentiated once only: double backward"):
                differentiate(retain_graph=True)

    on_ranks(2, attend)


def test_an_empty_batch():
    def attend(comm, _):
        shards = [torch.randn(0, 5, 4, 8, requires_grad=True) for _ in range(3)]
        for schedule in SCHEDULES:
            out = ring_dilated_attention(*shards, PATTERN, comm, schedule=schedule)
            out.sum().backward()
            assert out.shape == (0, 5, 4, 8)

    on_ranks(2, attend)
