"""Leaks, changed inputs and bits of repeated calls."""

from dataclasses import replace

import pytest
import torch
from helpers.backends_here import on
from helpers.pairwise import diagonal

from dilkit import Backend, Pattern, dilated_attention, explain
from dilkit.registry import backends
from dilkit.testing.problems import NESTED, RAGGED, SPARSE, Case
from dilkit.testing.tensors import make_tensors
from dilkit.threads import torch_threads

PATTERNS = {
    "nested": NESTED,
    "ragged": RAGGED,
    "sparse": SPARSE,
    "once": Pattern([8, 16], [1, 2], overlap="once"),
    "block": Pattern([8, 16], [2, 4], offset="block"),
    "head split": Pattern.head_split([8, 16], [1, 2], 4),
    "dense": Pattern.dense(),
}
BASE = Case(feature="behaviour", variant="base", seq=23, head_dim=8, batch=1)

pytestmark = pytest.mark.parametrize("backend", on("cpu"))


def attend(backend, case, tensors, **inputs):
    decision = next(d for d in explain(case.problem(), backend).decisions if d.name == backend)
    if decision.verdict != "picked":
        pytest.skip("; ".join(decision.reasons))
    q, k, v = (inputs.get(name, x) for name, x in zip(("query", "key", "value"), tensors.qkv, strict=True))
    options = dict(is_causal=case.is_causal, key_padding_mask=tensors.mask, scale=case.scale)
    return dilated_attention(q, k, v, case.pattern, backend=backend, return_lse=True, **options)


def test_the_same_bits_with_the_same_number_of_threads_and_with_any_where_that_is_promised(backend):
    case = replace(BASE, seq=157, batch=2, mask="random")
    tensors, found = make_tensors(case), []
    for threads in (1, 2, 4):
        with torch_threads(threads):
            first, again = (everything(backend, case, tensors) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), threads
        found.append(first)
    known = backends()[backend]
    if isinstance(known, Backend) and known.reproducible:
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def everything(backend, case, tensors):
    qkv = [x.clone().requires_grad_() for x in tensors.qkv]
    out, lse = attend(backend, case, tensors, query=qkv[0], key=qkv[1], value=qkv[2])
    return (out, lse, *torch.autograd.grad((out, lse), qkv, (tensors.dout, tensors.dlse)))


def test_nothing_is_saved_without_gradients(backend):
    tensors = make_tensors(BASE)
    qkv = dict(zip(("query", "key", "value"), (x.clone().requires_grad_() for x in tensors.qkv), strict=True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            out, lse = attend(backend, BASE, tensors, **qkv)
        attend(backend, BASE, tensors)
        assert not saved
        assert out.grad_fn is None
        assert lse.grad_fn is None
        attend(backend, BASE, tensors, **qkv)
    assert saved


@pytest.mark.parametrize(("pattern", "is_causal"), diagonal(PATTERNS.values(), [False, True]), ids=str)
def test_a_token_changes_exactly_the_rows_that_see_it(backend, pattern, is_causal):
    case = replace(BASE, pattern=pattern, is_causal=is_causal)
    tensors = make_tensors(case)
    before, _ = attend(backend, case, tensors)
    seen = pattern.count(case.seq, case.heads, is_causal=is_causal) > 0
    for j in range(case.seq):
        value = tensors.value.clone()
        value[:, j] += 10.0
        after, _ = attend(backend, case, tensors, value=value)
        assert torch.equal((before != after).any(-1)[0].T, seen[:, :, j]), f"token {j}"


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_nan_reaches_the_rows_that_see_it_alone(backend, pattern):
    case = replace(BASE, pattern=pattern)
    tensors = make_tensors(case)
    key, value = tensors.key.clone(), tensors.value.clone()
    key[:, 5], value[:, 5] = torch.nan, torch.nan
    out, _ = attend(backend, case, tensors, key=key, value=value)
    sees = pattern.count(case.seq, case.heads)[..., 5] > 0
    assert torch.equal(out[0].isnan().any(-1).T, sees.expand(case.heads, -1))


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_see_nothing_have_no_gradient_whatever_they_hold(backend, is_causal):
    case = replace(BASE, pattern=Pattern.dense(), is_causal=is_causal, batch=2, mask="left")
    tensors = make_tensors(case)
    mask = torch.zeros(2, case.seq, dtype=torch.bool)
    mask[0], mask[1, 0] = True, True
    unseeing = mask if is_causal else mask.all(1, keepdim=True).expand_as(mask)
    inputs = [x.clone() for x in tensors.qkv]
    inputs[0][unseeing] = torch.nan
    inputs = [x.requires_grad_() for x in inputs]
    out, _ = attend(backend, case, replace(tensors, mask=mask), **dict(zip(("query", "key", "value"), inputs, strict=True)))
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[0][unseeing].any()
