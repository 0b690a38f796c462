"""Tensors as the kernels in numba.cuda get them."""

from __future__ import annotations

import torch

from dilkit.backends.numba.arguments import view


def test_a_view_reaches_from_the_first_number_to_the_last() -> None:
    whole = torch.arange(3.0 * 5 * 4 * 8, requires_grad=True)
    x = whole.view(3, 5, 4, 8).transpose(1, 2)[1:, 1:, ::2, 2:6]
    numbers, *strides = view(x)
    assert strides == [160, 8, 64]
    assert not numbers.requires_grad
    assert numbers.data_ptr() == x.data_ptr()
    assert (numbers[0], numbers[-1]) == (x[0, 0, 0, 0], x[-1, -1, -1, -1])
    index = torch.tensor(strides) @ torch.tensor([1, 2, 1]) + 3
    assert numbers[index] == x[1, 2, 1, 3]
    expanded = torch.ones(1, 1, 4).expand(2, 7, 3, 4)
    assert (view(expanded).numbers.tolist(), view(expanded)[1:]) == ([1.0] * 4, (0, 0, 0))
