"""The CPU kernel as it is called."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from dilkit import GlobalTokens, Neighborhood, Pattern, Problem, SlidingWindow, Strided, dilated_attention
from dilkit.oracle import oracle_attention
from dilkit.problem import DTYPES
from dilkit.registry import backends
from dilkit.testing import memory
from dilkit.threads import torch_threads

PATTERN = Pattern([256, 1024], [1, 4])
OTHER_KINDS = [
    Pattern.natten((10, 103), (5, 9), (2, 1)),
    Pattern.of(Strided(10), SlidingWindow(300, 5)),
    Pattern.of(*PATTERN.branches, SlidingWindow(90), Neighborhood((10, 103), 5), GlobalTokens(3), overlap="once"),
]


@pytest.fixture
def threads():
    with torch_threads(4):
        yield


def inputs(seq=1030, heads=4, dim=32, dtype="float32", batch=1):
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch, seq, heads, dim, generator=draw).to(getattr(torch, dtype)) for _ in range(3))


def everything(dtype, is_causal, pattern=PATTERN):
    q, k, v = (x.requires_grad_() for x in inputs(dtype=dtype, batch=2))
    out, lse = dilated_attention(q, k, v, pattern, is_causal=is_causal, backend="native", return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "pattern"), [*((dtype, PATTERN) for dtype in DTYPES), *(("float32", x) for x in OTHER_KINDS)])
def test_the_same_bits_run_to_run_and_with_any_number_of_threads(dtype, pattern):
    first = everything(dtype, dtype != "float64", pattern)
    for count in (4, 1, 2, 7):
        torch.set_num_threads(count)
        again = everything(dtype, dtype != "float64", pattern)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), count


@pytest.mark.usefixtures("threads")
def test_several_python_threads_at_once():
    patterns = [PATTERN, Pattern([64], [1]), Pattern([100, 300], [3, 2]), Pattern.dense()]
    q, k, v = inputs(seq=512)
    alone = [dilated_attention(q, k, v, pattern, backend="native") for pattern in patterns]
    jobs = [*range(len(patterns))] * 5
    with ThreadPoolExecutor(len(patterns)) as pool:
        found = pool.map(lambda i: dilated_attention(q, k, v, patterns[i], backend="native"), jobs)
        assert all(torch.equal(alone[i], out) for i, out in zip(jobs, found, strict=True))


def test_a_nan_reaches_no_gradient_of_queries_that_do_not_see_its_key():
    """Filled tiles do not carry it either: head 0 sees the key in a short tile, head 1 has longer ones later."""
    pattern = Pattern([10, 40], [1, 1], heads=[(0, 1), (1, 2)])
    q, k, v, dout = torch.randn(1, 80, 2, 16), torch.randn(1, 80, 1, 16), torch.randn(1, 80, 1, 16), torch.randn(1, 80, 2, 16)
    k[0, 43] = torch.nan
    q.requires_grad_()
    (dq,) = torch.autograd.grad(dilated_attention(q, k, v, pattern, backend="native"), q, dout)
    seen = torch.zeros(80, 2, dtype=torch.bool)
    seen[40:50, 0] = seen[40:80, 1] = True
    assert torch.equal(dq[0].isnan().any(-1), seen)


def _in_child(qkv, queue):
    """The sum is numpy's, for torch's own operators may hang after a fork."""
    queue.put((torch.get_num_threads(), float(dilated_attention(*qkv, PATTERN, backend="native").numpy().sum())))


@pytest.mark.usefixtures("threads")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_with_several_threads():
    qkv = inputs()
    expected = float(dilated_attention(*qkv, PATTERN, backend="native").numpy().sum())  # the parent's threads exist by now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(qkv, queue))
    child.start()
    try:
        assert queue.get(timeout=60) == (4, expected)
    finally:
        child.kill()
        child.join()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say there how large a process is")
def test_scratch_that_a_thread_keeps_ends_with_it():
    data, pages = inputs(seq=192, heads=1, dim=64), []
    for _ in range(80):
        thread = threading.Thread(target=dilated_attention, args=(*data, Pattern.dense()), kwargs=dict(backend="native"))
        thread.start()
        thread.join()
        pages.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert (pages[-1] - pages[20]) * os.sysconf("SC_PAGE_SIZE") < 60 * 50_000, "each keeps a multiple of that"


@pytest.mark.usefixtures("threads", "ctrl_c")
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_long_call(gradients):
    x = torch.zeros(1, 1, 1, 64).expand(1, 1 << 16, 1, 64).requires_grad_(gradients)  # seconds of work in a dense pattern
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            dilated_attention(x, x, x, Pattern.dense(), backend="native")
    finally:
        timer.cancel()
    everything("float32", is_causal=True)


def test_storage_at_any_address():
    whole = torch.randn(1, 40, 2, 16)
    raw = np.zeros(whole.numel() * 4 + 1, np.uint8)[1:]
    raw[:] = whole.numpy().view(np.uint8).ravel()
    odd = torch.from_numpy(raw.view(np.float32).reshape(whole.shape))
    assert odd.data_ptr() % 4
    results = [dilated_attention(x, x, x, Pattern([8, 16], [1, 2]), backend="native") for x in (odd, whole)]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("pattern", "is_causal"), [(Pattern.dense(), False), (Pattern([128, 300], [1, 2]), True), (OTHER_KINDS[0], False)]
)
def test_rows_that_are_read_where_they_lie_give_the_bits_of_those_that_are_packed(dtype, pattern, is_causal):
    """Rows of a head are adjacent, as in (batch, heads, seq, head_dim), beside rows of all heads in turn."""
    results = []
    for follow in (False, True):
        q, k, v, dout = (
            x.transpose(1, 2).contiguous().transpose(1, 2) if follow else x
            for x in (*inputs(dim=64, dtype=dtype), *inputs(dim=64, dtype=dtype)[:1])
        )
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = dilated_attention(q, k, v, pattern, is_causal=is_causal, backend="native", return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_rows_further_apart_than_32_bits_count():
    try:
        room = torch.empty(5 << 28)  # 5 GiB of which only the rows that are written to become memory
    except RuntimeError as error:
        pytest.skip(f"this machine does not set aside 5 GiB: {error}")
    x = room.as_strided((1, 20, 1, 8), (0, 1 << 26, 0, 1))
    x.copy_(torch.randn(1, 20, 1, 8))
    near = x.clone()
    results = [dilated_attention(y, y, y, Pattern([8, 16], [1, 2]), backend="native") for y in (x, near)]
    assert torch.equal(*results)


@pytest.mark.parametrize("dim", [1, 7, 31, 100, 255, 256, 300])
def test_any_head_dim(dim):
    q, k, v = inputs(seq=50, heads=2, dim=dim)
    out = dilated_attention(q, k, v, Pattern([16, 32], [1, 2]), backend="native")
    exact, _ = oracle_attention(q, k, v, Pattern([16, 32], [1, 2]))
    torch.testing.assert_close(out.double(), exact.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_numbers_that_are_none_reach_the_rows_that_see_them(is_causal, which, bad):
    """The oracle lets NaN and infinity reach rows that see none of them, as 0 * NaN is NaN."""
    qkv, pattern = inputs(seq=64, heads=2, dim=8), Pattern([16, 64], [1, 2])
    qkv[which][0, 20, 0, 3] = bad
    out = dilated_attention(*qkv, pattern, is_causal=is_causal, backend="native")
    exact, _ = oracle_attention(*qkv, pattern, is_causal=is_causal)
    broken, expected = ((~x.isfinite()).any(-1) for x in (out, exact))
    sees = pattern.count(64, 2, is_causal=is_causal)[:, :, 20].T[None] > 0 if which else torch.zeros(1, 64, 2, dtype=torch.bool)
    if which == 0:
        sees[0, 20, 0] = True
    sees[:, :, 1] = False  # the other head
    assert not (broken & ~expected).any()
    assert torch.equal(broken & sees, expected & sees)
    torch.testing.assert_close(out[~expected].double(), exact[~expected].double(), rtol=0, atol=1e-5)


def test_more_branches_than_bits_are_refused():
    problem = Problem(pattern=Pattern([8] * 65, [1] * 65), seq=8, heads=1, head_dim=8)
    (refusal,) = backends()["native"].refusals(problem)
    assert "65" in str(refusal)
    assert "64" in str(refusal)


@pytest.mark.usefixtures("threads")
def test_a_forward_pass_holds_little_beyond_its_results():
    q, k, v = inputs(seq=8192, heads=8, dim=64)

    def forward():
        return dilated_attention(q, k, v, Pattern([2048, 8192], [1, 4]), backend="native")

    forward()
    try:
        peak = memory.peak_memory(forward)
    except memory.MeasureError as error:
        pytest.skip(str(error))
    assert peak - q.nbytes - 4 * 8 * 8192 < 4 * 2**20
