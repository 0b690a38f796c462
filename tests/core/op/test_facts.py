"""What is read of tensors in C: only tensors that pass every check of `dilated_attention` may count as surely fitting."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dilkit import Pattern, Problem
from dilkit.backends.native.backend import Native
from dilkit.inputs import Inputs
from dilkit.op._facts import facts_undispatched, key_of, plain_facts, surely_fit, undispatched
from dilkit.op.arguments import _check_tensors
from dilkit.op.boundary import INPUTS

SHAPE = 1, 6, 4, 8
SHAPES = [SHAPE, (1, 6, 2, 8), (1, 6, 3, 8), (2, 6, 4, 8), (1, 5, 4, 8), (1, 6, 4, 1), (1, 6, 0, 8), (1, 0, 4, 8), (1, 6, 4, 0)]
DTYPES = torch.float64, torch.bfloat16, torch.int32, torch.complex64, torch.float8_e5m2
READS_IN_C = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
ODD: tuple[Callable[[], Any], ...] = (
    lambda: torch.zeros(SHAPE, device="meta"),
    lambda: torch.zeros(1, 6, 8, 4).mT,
    lambda: torch.zeros(1, 4, 6, 8).transpose(1, 2),
    lambda: torch.zeros(1, 6, 4, 9)[..., ::9],
    lambda: torch.zeros(6, 4, 8),
    lambda: torch.zeros(SHAPE).to_sparse(),
    lambda: torch.nested.nested_tensor([torch.zeros(6, 4, 8)]),
    lambda: torch.nn.Parameter(torch.zeros(SHAPE)),
    lambda: torch._efficientzerotensor(SHAPE),
    lambda: None,
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_surely_fit_pass_every_check() -> None:
    makers = [partial(torch.zeros, shape) for shape in SHAPES] + [partial(torch.zeros, SHAPE, dtype=dtype) for dtype in DTYPES]
    made = [make() for make in (*makers, *ODD)]
    for x, y in itertools.product(made, repeat=2):
        for tensors in ((x, y, y), (y, x, y), (y, y, x)):
            facts = plain_facts(*tensors)
            assert facts is None or (facts == key_of(INPUTS, tensors) and undispatched(tensors))
            if facts is not None or surely_fit(*tensors):
                _check_tensors(*tensors)


@pytest.mark.skipif(not READS_IN_C, reason="this torch does not describe its tensors to C")
def test_ordinary_tensors_surely_fit() -> None:
    query, key = torch.zeros(SHAPE), torch.zeros(1, 4, 6, 8).transpose(1, 2)
    assert surely_fit(query, key, key)
    assert surely_fit(query.requires_grad_(), key[:, :, :2], key[:, :, :2])
    assert surely_fit(*torch.zeros(3, *SHAPE, dtype=torch.bfloat16).unbind())
    assert not surely_fit(query, key[:, :, :3], key[:, :, :3])
    assert plain_facts(query, key, key) == facts_undispatched((query, key, key)) == key_of(INPUTS, (query, key, key))
    assert plain_facts(query, key[:, :, :3], key[:, :, :3]) is None


@pytest.mark.parametrize("at", range(3))
def test_the_kernel_refuses_what_is_no_tensor(at: int) -> None:
    problem = Problem.of(torch.zeros(SHAPE), torch.zeros(SHAPE), Pattern.dense())
    tensors: list[Any] = [torch.zeros(SHAPE)] * 3
    tensors[at] = [0.0]
    with pytest.raises((AttributeError, TypeError), match="list"):
        Native().forward(Inputs(*tensors), problem)
