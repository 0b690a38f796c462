"""torchtitan's inner attention."""

import doctest
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from helpers import launch
from torch.testing import assert_close

from dilkit import Pattern, SlidingWindow, dilated_attention

pytest.importorskip("torch.distributed.tensor.parallel", reason="this torch is built without torch.distributed")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import parallelize_module

from dilkit.integrations import torchtitan
from dilkit.integrations.torchtitan import ContextParallelStyle, InnerAttention

PATTERN = Pattern([8, 24], [1, 2])


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(44, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]


Q, K, V = (x.detach() for x in inputs())


def test_the_examples_do_what_they_say():
    assert doctest.testmod(torchtitan).failed == 0


def test_packed_tokens_are_sequences_of_their_own():
    whole = InnerAttention(PATTERN)(Q, K, V, scale=0.3, enable_gqa=True)
    assert_close(whole, dilated_attention(Q[None], K[None], V[None], PATTERN, is_causal=True, scale=0.3)[0])
    packed = InnerAttention(PATTERN)(Q, K, V, attention_masks=SimpleNamespace(cu_seq_q=torch.tensor([0, 20, 44])))
    second = dilated_attention(Q[None, 20:], K[None, 20:], V[None, 20:], PATTERN, is_causal=True)
    assert_close(packed[20:], second[0])


REFUSED = {
    "a mask": (lambda: InnerAttention(PATTERN)(Q, K, V, block_mask=1), ValueError, "block_mask: the pattern defines"),
    "a mask that is a tensor": (
        lambda: InnerAttention(PATTERN)(Q, K, V, block_mask=Q),
        ValueError,
        "block_mask: the pattern defines",
    ),
    "no metadata": (lambda: InnerAttention(PATTERN)(Q, K, V, attention_masks=Q), TypeError, "attention_masks is a Tensor"),
    "a batch": (lambda: InnerAttention(PATTERN)(Q[None], K[None], V[None]), ValueError, r"q has shape \(1, 44, 4, 8\)"),
    "no pattern": (lambda: InnerAttention(3), TypeError, "pattern=3 is a int"),
    "another module": (lambda: ContextParallelStyle()._apply(torch.nn.Linear(1, 1), None), TypeError, "module is a Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


PATTERNS = (
    PATTERN,
    Pattern.of(SlidingWindow(7), SlidingWindow(3, heads=(0, 2))),
    Pattern.of(SlidingWindow(5, heads=(0, 2))),
)
MASKS = None, SimpleNamespace(cu_seq_q=torch.tensor([0, 7, 40, 44], dtype=torch.int32))


def results(inner, tensors, masks):
    out = inner(*tensors, attention_masks=masks)
    out.sin().sum().backward()
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in (out, *(x.grad for x in tensors))]


def rows_and_heads(world, rows):
    """torchtitan's layout over `rows` ranks of rows along `cp`, and the others of heads along `tp`.

    Once as DTensors sharded by both; once by rows, handed to the module as plain tensors by `local_map`, as torchtitan does.
    """
    mesh, of_rows = init_device_mesh("cpu", (rows, world.size // rows), mesh_dim_names=("cp", "tp")), [Shard(0)]
    for pattern, masks in product(PATTERNS, MASKS):
        expected = results(InnerAttention(pattern), inputs(), masks)
        styled = parallelize_module(InnerAttention(pattern), mesh["cp"], ContextParallelStyle())
        local = dict(
            out_placements=of_rows, in_placements=(of_rows,) * 3, in_grad_placements=(of_rows,) * 3, device_mesh=mesh["cp"]
        )
        ways = (InnerAttention(pattern), mesh, [Shard(0), Shard(1)]), (local_map(styled, **local), mesh["cp"], of_rows)
        for inner, own, placements in ways:
            spread = [distribute_tensor(x.detach(), own, placements).requires_grad_() for x in inputs()]
            assert_close(results(inner, spread, masks), expected)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.slow
def test_over_ranks(ranks, rows):
    launch.run("gloo", ranks, rows_and_heads, rows)
