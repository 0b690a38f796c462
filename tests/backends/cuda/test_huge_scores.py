"""Scores so large that products and sums rounded together, as GPUs round them, differ from those rounded apart by more than 1."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import host_compile, huge_scores
from helpers.fakes import registered
from helpers.forks import in_child
from helpers.host_launcher import HostLauncher
from helpers.on_host import TENSOR_CORES, OnHost

from dilkit import Alibi, Pattern, alibi_slopes
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.inputs import Inputs
from dilkit.problem import Problem


def rounded_together(function: Callable[[], object]):
    torch.set_num_threads(1)  # a forked child has none of its parent's
    for known in (host_compile.library, host_compile.compile_kernel):
        known.cache_clear()
    host_compile.FLAGS = tuple(flag.replace("contract=off", "contract=fast").replace("-Og", "-O2") for flag in host_compile.FLAGS)
    function()


@pytest.mark.parametrize(("dtype", "size"), [("float16", 3e4), ("float16", 3e3), ("float32", 3e4)])
def test_a_row_of_huge_scores_comes_to_an_end(dtype, size):
    """A process of its own can be ended if the kernel does not end. Two keys far apart have the largest score."""
    assert in_child(partial(rounded_together, partial(attend, dtype, size)), limit=200) == "done"


def attend(dtype_name: str, size: float):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    query, key, value = (torch.randn(1, 128, 1, 16) for _ in range(3))
    query, key, value = (size * query).to(dtype).abs(), (size * key).to(dtype).abs(), value.to(dtype)
    query, key = query.clamp(max=6e4), key.clamp(max=6e4)
    key[:, 64:] = key[:, :64]
    problem = Problem.of(query, key, Pattern([128], [1]))
    out, lse = CupyRaw(HostLauncher(workers=1), (8, 0)).forward(Inputs(query, key, value), problem)
    scores = torch.einsum("bihd,bjhd->bhij", query.double(), key.double()) * problem.scale
    assert torch.allclose(lse.double(), scores.logsumexp(-1), rtol=1e-6)
    want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value.double())
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("dtype", "pattern", "options"),
    [
        ("float32", "window", {}),
        ("float16", "dense", {}),
        ("bfloat16", "few rows", dict(dim=128)),
        pytest.param("bfloat16", "dense", dict(bias=Alibi(alibi_slopes(2))), marks=pytest.mark.slow),
        pytest.param("float32", "dense", dict(bias=Alibi(alibi_slopes(2))), marks=pytest.mark.slow),
    ],
)
def test_a_key_that_is_seen_alone_has_a_weight_of_1(dtype, pattern, options):
    def check():
        with registered(OnHost(TENSOR_CORES)) as backend:
            huge_scores.check(backend, dtype, pattern=huge_scores.PATTERNS[pattern], **options)

    assert in_child(partial(rounded_together, check), limit=200) == "done"
