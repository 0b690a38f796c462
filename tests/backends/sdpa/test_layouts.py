"""Layouts of the tensors that kernels are given."""

import pytest
import torch
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.sdpa import aten
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS, cpu_layout, cuda_layout
from dilkit.device import Device
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.tools.bench.suites.gpu import CONFIGURATIONS

CUDNN = next(kernel for kernel in KERNELS if kernel.name == "cudnn")
FORWARD = "_scaled_dot_product_cudnn_attention"
HALF = torch.empty(2, 6, 4, 40, dtype=torch.bfloat16)
"""`(batch, seq, heads, head_dim)`, of rows of 80 bytes."""
WIDE = torch.empty(2, 6, 4, 3 * 40 + 4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layout", "x", "copied"),
    [
        (cuda_layout, HALF, False),
        (cuda_layout, HALF.transpose(0, 1), False),
        (cuda_layout, HALF[:, 1:5:2, 1:], False),
        (cuda_layout, WIDE[..., 40:80], True),  # rows begin at multiples of 8 bytes
        (cuda_layout, WIDE[:1, :1, :1, 40:80], False),  # its one row does not
        (cuda_layout, WIDE[:1, :1, :1, 4:44], True),
        (cuda_layout, torch.empty(2, 6, 4, 7, dtype=torch.float32), False),  # whole rows are no multiple of 16 bytes
        (cuda_layout, HALF[:, :, :1].expand(-1, -1, 4, -1), False),
        (CUDNN.layout, HALF[:, :, :1].expand(-1, -1, 4, -1), True),
        (CUDNN.layout, HALF[:1].expand(1, -1, -1, -1), False),
        (CUDNN.layout, WIDE[..., 40:80], True),
        (CUDNN.layout, HALF[:, 1:5:2], False),
        (cpu_layout, WIDE[..., 40:80], False),
        (cpu_layout, HALF[:, :1].expand(-1, 6, -1, -1), True),
    ],
)
def test_what_is_copied(layout, x, copied):
    found = layout(x)
    assert (found is not x) == copied
    assert found.is_contiguous() or not copied
    assert found.shape == x.shape
    assert layout is cpu_layout or x.shape[3] == 7 or found.data_ptr() % 16 == 0


@pytest.fixture
def operators(monkeypatch):
    """The calls of torch's operators so far: name, and tensors `(batch, heads, rows, head_dim)` given."""
    calls, operator = [], aten._aten

    def recorded(name):
        def run(*arguments, **options):
            calls.append((name, [x for x in arguments if isinstance(x, Tensor) and x.dim() == 4]))
            return operator(name)(*arguments, **options)

        return run

    monkeypatch.setattr(aten, "_aten", recorded)
    return calls


def meta(problem, width=128):
    """Make query, key, value and dout without memory: slices of rows of `width` numbers."""
    heads = problem.heads, problem.kv_heads, problem.kv_heads, problem.heads
    made = (torch.empty(1, problem.seq, h, width, dtype=torch.bfloat16, device="meta") for h in heads)
    return [x[..., : problem.head_dim] for x in made]


@pytest.mark.parametrize(("letter", "calls"), [("A", 7), ("B", 3), ("C", 6)])
def test_cudnn_is_given_views_alone(letter, calls, operators):
    """Each call has query, key and value alike, with places and strides in multiples of 16 bytes."""
    posed = CONFIGURATIONS[letter].problem(128, 1, device=Device.assume("sm_90"), dtype="bfloat16", requires_grad=True)
    (q, k, v, dout), backend = meta(posed), SDPA((CUDNN,))
    out, lse = backend.forward(Inputs(q, k, v), posed)
    backend.backward(dout, Inputs(q, k, v), out, lse, posed)
    forward, backward = operators[:calls], operators[calls:]
    assert [name for name, _ in operators] == [FORWARD] * calls + [f"{FORWARD}_backward"] * calls
    for (_, (query, *others)), (_, (*views, lse_of_call)) in zip(forward, backward, strict=True):
        laid_out = query.shape, query.stride(), query.storage_offset()
        assert not any(number % 8 for number in (*laid_out[1][:3], laid_out[2]))
        assert {(x.shape, x.stride(), x.storage_offset()) for x in (*others, *views)} == {laid_out}
        of_views = [x.untyped_storage()._cdata for x in (query, *others, *views)]
        assert of_views == [x.untyped_storage()._cdata for x in (q, k, v, dout, q, k, v, out)]
        batch, heads, rows, _ = query.shape
        assert (lse_of_call.shape, lse_of_call.stride()) == ((batch, heads, rows, 1), (heads * rows, rows, 1, 1))


@pytest.mark.parametrize("at", ["query", "dout"])
def test_a_backward_pass_of_cudnn_has_equal_strides(at, operators):
    """torch reuses plans for other layouts of `dout` or `out`."""
    posed = Problem(
        pattern=Pattern([64, 256], [1, 4]), seq=256, heads=8, head_dim=64, dtype="bfloat16", device=Device.assume("sm_90")
    )
    (q, k, v, dout), (wide, *_) = meta(posed, 64), meta(posed, 192)
    given = dict(dout=dout, query=q) | {at: wide}
    out, lse = torch.empty_like(q), torch.empty(1, 8, 256, device="meta")
    SDPA((CUDNN,)).backward(given["dout"], Inputs(given["query"], k, v), out, lse, posed)
    for _, (of_dout, query, _, _, of_out, _) in operators:
        assert of_dout.stride() == query.stride() == of_out.stride()


@pytest.mark.parametrize("dims", [3, 4])
def test_lse_has_the_form_that_this_torch_gives_it_for_cudnn(dims, monkeypatch):
    given = []
    monkeypatch.setattr(aten, "_aten", lambda name: lambda *arguments, **options: given.extend(arguments) or (None, None, None))
    x, lse = torch.empty(2, 3, 4, 8, device="meta"), torch.empty(2, 3, 4, device="meta")
    made = torch.empty(2, 3, 4, 1, device="meta") if dims == 4 else lse
    monkeypatch.setattr(torch.ops.aten._scaled_dot_product_cudnn_attention, "default", lambda *_, **options: (x, made))
    aten._cudnn_lse_dims.cache_clear()
    aten.cudnn_backward(x, x, x, x, x, lse, None, False, 1.0)
    aten._cudnn_lse_dims.cache_clear()
    assert given[5].shape == made.shape
