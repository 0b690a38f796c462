"""Ranks on a GPU, without one: tensors say that they lie on it, and torch would refuse them together with others."""

from dataclasses import replace

import pytest
import torch
from helpers.ranks import PATTERN, even_cuts, uneven_cuts
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dilkit.comm import exchange_plan, run_threads
from dilkit.comm.passes.attention_op import AttentionOp
from dilkit.comm.passes.autograd import PassContext, _backward, forward_pass
from dilkit.inputs import Inputs
from dilkit.op.call_options import CallOptions
from dilkit.testing.problems import Case
from dilkit.testing.tensors import make_tensors

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
RANKS = 3
CASE = Case(feature="over ranks", variant="devices", pattern=PATTERN, seq=97, kv_heads=2, mask="random")


class PretendedGpu(TorchFunctionMode):
    """Within the block, tensors for the GPU lie in host memory and say that they do not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, tensors = kwargs or {}, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if on_gpu(x)]
        if there and func == Tensor.device.__get__:
            return GPU
        if there and func == Tensor.is_cuda.__get__:
            return True
        if func is Tensor.numpy and there:
            raise TypeError("a tensor on a GPU has no numpy array")
        if there and len(there) < len([x for x in tensors if x.dim()]):
            raise RuntimeError(f"{func.__name__}: tensors on the GPU and on the host")
        named = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)]
        args, kwargs = tree_map(lambda x: HOST if isinstance(x, torch.device) else x, (args, kwargs))
        found = func(*args, **kwargs)
        return put(found) if (named == [GPU] if named else there) else found


def put(found):
    def marked(x):
        if isinstance(x, Tensor) and not on_gpu(x):
            x = x.detach()
            x.__dict__["on_gpu"] = True
        return x

    with torch._C.DisableTorchFunction():
        return tree_map(marked, found)


def on_gpu(x):
    return "on_gpu" in x.__dict__


def rank_of(case, cuts, gpu, **options):
    tensors = make_tensors(case)
    plan = exchange_plan(case.pattern, cuts, case.heads, case.kv_heads, is_causal=case.is_causal, **options)

    def on_rank(comm):
        rows = slice(*cuts[comm.rank : comm.rank + 2])
        given = (tensors.query, tensors.key, tensors.value, tensors.mask, tensors.dout)
        query, key, value, mask, dout = (x.detach()[:, rows].contiguous() for x in given)
        if gpu:
            query, key, value, mask, dout = put((query, key, value, mask, dout))
        op = AttentionOp(CallOptions(case.pattern, requires_grad=True, scale=0.3))
        context = PassContext(op, comm, plan, len(query), query.device, gradients="qkv", began=0)
        inputs = Inputs(query, key, value, mask)
        _, out, lse, held = forward_pass(context, inputs)
        *grads, _ = _backward(context, dout, inputs, out, lse, held)
        return [out, lse, *grads]

    def pretending(comm):
        with PretendedGpu():
            found = on_rank(comm)
        assert all(map(on_gpu, found))
        return found

    return pretending if gpu else on_rank


@pytest.mark.parametrize("schedule", ["auto", "scatter", "gather", "ring", "one by one"])
@pytest.mark.parametrize(("cuts", "is_causal"), [(even_cuts, True), (uneven_cuts, False)])
def test_what_is_computed_with_lies_where_the_rows_do(schedule, cuts, is_causal):
    one_by_one = schedule == "one by one"
    options = dict(schedule="auto" if one_by_one else schedule, fuse_branches=not one_by_one)
    case, shards = replace(CASE, is_causal=is_causal), cuts(CASE.seq, RANKS)
    there, here = (run_threads(RANKS, rank_of(case, shards, gpu, **options), timeout=20) for gpu in (True, False))
    for rank in range(RANKS):
        for x, like in zip(there[rank], here[rank], strict=True):
            torch.testing.assert_close(x, like)
