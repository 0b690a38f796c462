"""`dilated_attention_varlen`."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers.calls import differentiated, encode_call, random_leaves, starts_of
from helpers.fakes import Fake, registered
from helpers.pairwise import every_pair

from dilkit import GlobalTokens, Pattern, Problem, SlidingWindow, Strided, dilated_attention, dilated_attention_varlen
from dilkit.backends.native.backend import _instruction_sets
from dilkit.inputs import Inputs
from dilkit.op.operators import forward_op
from dilkit.op.sequences import assert_lengths, longest
from dilkit.threads import torch_threads

PATTERN = Pattern([8, 16, 64], [1, 2, 4])
RAGGED = [0, 5, 70, 0, 1, 300, 17, 0]
ABLE = ["native", "sdpa", "reference"]


def tensors(total, heads=(4, 2), seed=0, dtype=torch.float64):
    return random_leaves(*((total, h, 6) for h in (heads[0], heads[1], heads[1])), seed=seed, dtype=dtype)


def one_by_one(lengths, pattern, **options):
    def attend(*qkv):
        cuts = list(pairwise(starts_of(lengths).tolist()))
        parts = [dilated_attention(*(x[None, s:t] for x in qkv), pattern, return_lse=True, **options) for s, t in cuts]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    return attend


def packed(lengths, pattern, **options):
    return lambda *qkv: dilated_attention_varlen(*qkv, pattern, starts_of(lengths), return_lse=True, **options)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("isa", "dtype", "is_causal", "threads"), every_pair(_instruction_sets(), DTYPES, [False, True], [1, 2]), ids=str
)
def test_native_gives_the_bits_of_one_by_one(isa, dtype, is_causal, threads, monkeypatch):
    monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    for pattern in (PATTERN, Pattern([24, 512], [2, 8], tail="zeros"), Pattern([30, 77], [1, 3], overlap="once")):
        inputs, options = tensors(sum(RAGGED), dtype=dtype), dict(is_causal=is_causal, backend="native")
        with torch_threads(threads):
            alone = differentiated(one_by_one(RAGGED, pattern, **options), inputs)
            for found, right in zip(differentiated(packed(RAGGED, pattern, **options), inputs), alone, strict=True):
                assert torch.equal(found, right)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_nothing_but_empty_sequences(backend, lengths):
    pattern = PATTERN if backend == "sdpa" else PATTERN.with_branches(*PATTERN.branches, *Pattern.natten((3, 3), 3).branches)
    out, lse, dq, dk, _ = differentiated(packed(lengths, pattern, backend=backend), tensors(0))
    assert (out.shape, lse.shape, dq.shape, dk.shape) == ((0, 4, 6), (4, 0), (0, 4, 6), (0, 2, 6))


def test_thousands_of_sequences_take_one_call_of_the_kernel(monkeypatch):
    from dilkit.backends.native import _native

    calls = []
    counting = SimpleNamespace(EncodedProblem=_native.EncodedProblem, instruction_sets=_native.instruction_sets)
    counting.forward = lambda *arguments: calls.append(1) or _native.forward(*arguments)
    monkeypatch.setattr("dilkit.backends.native.backend._kernel", lambda: counting)
    lengths = [i % 5 for i in range(5000)]
    qkv = [x.detach() for x in tensors(sum(lengths), dtype=torch.float32)]
    out = dilated_attention_varlen(*qkv, PATTERN, starts_of(lengths), backend="native")
    assert calls == [1]
    last = dilated_attention(*(x[None, -4:] for x in qkv), PATTERN, backend="native")
    assert torch.equal(out[-4:], last[0])


BEYOND = 2**24  # more than the numbers of positions that the CPU kernel compares
WHOLE_SEQUENCES = {
    "window": (Pattern.of(SlidingWindow(BEYOND)), Pattern.of(SlidingWindow(300))),
    "dilated window": (Pattern.of(SlidingWindow(2**62, 3)), Pattern.of(SlidingWindow(300, 3))),
    "window once": (
        Pattern.of(Strided(3), SlidingWindow(BEYOND), overlap="once"),
        Pattern.of(Strided(3), SlidingWindow(300), overlap="once"),
    ),
    "own token": (Pattern.of(SlidingWindow(2**63 - 1, 2**63 - 1)), Pattern.of(SlidingWindow(1))),
    "stride": (Pattern.of(Strided(2**62)), Pattern.of(SlidingWindow(1))),
    "segments": (Pattern([2**62], [3]), Pattern([300], [3])),
    "global tokens": (Pattern.of(GlobalTokens(2**62)), Pattern.of(GlobalTokens(300))),
}


@pytest.mark.parametrize("name", WHOLE_SEQUENCES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_numbers_beyond_the_longest_sequence_mean_all_of_it(name, is_causal):
    beyond, whole = WHOLE_SEQUENCES[name]
    options = dict(is_causal=is_causal, backend="native")
    found = differentiated(packed(RAGGED, beyond, **options), tensors(sum(RAGGED)))
    for got, right in zip(found, differentiated(packed(RAGGED, whole, **options), tensors(sum(RAGGED))), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("most", [1, 20, 1000, 2**23, 2**23 + 1, 17_000_000])
def test_what_a_call_is_prepared_for_is_no_more_than_a_window_over_the_longest_sequence(most):
    """Up to 2**23 rows it is a power of two, and a window between the two is one that kernels take."""
    prepared = longest(starts_of([1, most]), None, torch.empty(1, 1, 1, 1).expand(1, most + 1, 1, 1), None)
    assert most <= prepared < 2 * most
    assert prepared == most or prepared <= 2**23


@pytest.mark.parametrize("most", [15, 20, 2**31, 2**70])
def test_max_seqlen_may_be_more(most):
    assert torch.equal(dilated_attention_varlen(Q, K, V, PATTERN, CU, most), dilated_attention_varlen(Q, K, V, PATTERN, CU))
    assert longest(CU, most, Q[None], None) == 16


def test_what_is_prepared_is_no_longer_than_all_rows():
    meta = CU.to("meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dilkit.op.sequences.check_memory", lambda *_: None)
        assert longest(meta, 10**6, Q[None].to("meta"), None) == 20 + 12  # the power of two


@pytest.mark.parametrize(
    ("wrong", "most"),
    [([0, 5, 20], 14), ([0, 9, 5, 20], 20), ([1, 20], 20), ([0, 19], 20), ([0, 21], 21), ([0, -5, 20], 30)],
    ids=str,
)
def test_a_device_says_what_it_finds_wrong(wrong, most):
    """On a GPU it alone looks, where `max_seqlen` is given; here torch's assertion is checked at once."""
    assert_lengths(CU, 15, 20)
    assert_lengths(torch.tensor([0, 0, 0], dtype=torch.int32), 0, 0)
    with pytest.raises(RuntimeError, match="cu_seqlens is wrong: from 0 to the 20 rows of query without decreasing"):
        assert_lengths(torch.tensor(wrong, dtype=torch.int32), most, 20)


Q, K, V = (x.detach() for x in tensors(20))
CU, GONE = starts_of([5, 15]), starts_of([5, 15])
GONE.untyped_storage().resize_(0)
WRONG = {
    "a list": (dict(cu_seqlens=[0, 20]), TypeError, "cu_seqlens is a list"),
    "int64": (dict(cu_seqlens=CU.long()), TypeError, "cu_seqlens is torch.int64"),
    "no plain layout": (dict(cu_seqlens=CU.to_sparse()), TypeError, "cu_seqlens is torch.int32, torch.sparse_coo"),
    "two dimensions": (dict(cu_seqlens=CU[None]), ValueError, r"cu_seqlens has shape \(1, 3\)"),
    "no number": (dict(cu_seqlens=CU[:0]), ValueError, r"cu_seqlens has shape \(0,\)"),
    "another device": (dict(cu_seqlens=CU.to("meta")), ValueError, "cu_seqlens is on meta but query on cpu"),
    "no memory": (dict(cu_seqlens=GONE), ValueError, "cu_seqlens has shape .* beyond the 0 bytes of its storage"),
    "a late begin": (dict(cu_seqlens=CU + 1), ValueError, "cu_seqlens begins with 1; 0 is needed"),
    "an early end": (dict(cu_seqlens=CU[:2]), ValueError, "cu_seqlens ends with 5; .* needed, 20"),
    "a late end": (dict(cu_seqlens=starts_of([5, 16])), ValueError, "cu_seqlens ends with 21; .* needed, 20"),
    "a decrease": (dict(cu_seqlens=starts_of([15, -3, 8])), ValueError, "cu_seqlens decreases at index 2, from 15 to 12"),
    "too small a hint": (dict(max_seqlen=14), ValueError, "max_seqlen=14, but cu_seqlens has a sequence of 15 rows"),
    "a negative hint": (dict(max_seqlen=-1), ValueError, "max_seqlen=-1 must be at least 0"),
    "a truth as a hint": (dict(max_seqlen=True), TypeError, "max_seqlen=True is a bool"),
    "four dimensions": (dict(query=Q[None]), ValueError, r"query has shape \(1, 20, 4, 6\); \(total, heads, head_dim\)"),
    "no tensor": (dict(key=3), TypeError, "key is a int"),
    "two dimensions of rows": (dict(value=V[:, 0]), ValueError, r"value has shape \(20, 6\); \(total, heads, head_dim\)"),
    "no pattern": (dict(pattern=[8]), TypeError, "a dilkit.Pattern is needed"),
    "a backend that does not take them": (dict(backend="plain"), ValueError, "varlen yes: not supported"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named(wrong):
    changed, error, text = WRONG[wrong]
    with registered(Fake("plain", -1)), pytest.raises(error, match=text):
        dilated_attention_varlen(**{**dict(query=Q, key=K, value=V, pattern=PATTERN, cu_seqlens=CU), **changed})


OPERATOR = {
    "a batch": (dict(query=Q[None].expand(2, -1, -1, -1)), r"query has shape \(2, 20, 4, 6\); with cu_seqlens \(1, total"),
    "a mask": (dict(mask=torch.zeros(1, 20, dtype=torch.bool)), "key_padding_mask and cu_seqlens cannot go together"),
    "a decrease": (dict(cu_seqlens=starts_of([15, -3, 8])), "cu_seqlens decreases at index 2"),
    "too small a hint": (dict(max_seqlen=3), "max_seqlen=3, but cu_seqlens has a sequence of 15 rows"),
}


@pytest.mark.parametrize("wrong", OPERATOR)
def test_the_operator_names_what_does_not_fit(wrong):
    changed, text = OPERATOR[wrong]
    given = dict(query=Q[None], key=K[None], value=V[None], mask=None, cu_seqlens=CU, max_seqlen=None) | changed
    qkv, call = [given[name] for name in ("query", "key", "value")], encode_call(PATTERN, False, True, "")
    with pytest.raises(ValueError, match=text):
        forward_op(*qkv, given["mask"], 0.5, call, given["cu_seqlens"], given["max_seqlen"])


@pytest.mark.parametrize("wrong", [[0, 9, 5, 12], [1, 12], [0, 13]])
def test_the_kernel_takes_no_starts_beyond_its_tensors(wrong):
    """Checked once more where the addresses are taken, whoever calls."""
    from dilkit.backends.native.backend import Native

    query, key, value = (x.detach()[None] for x in tensors(12))
    sizes = dict(heads=query.shape[2], kv_heads=key.shape[2], head_dim=query.shape[3])
    problem = Problem(pattern=PATTERN, seq=16, dtype="float64", varlen=True, **sizes)
    with pytest.raises(ValueError, match="starts"):
        Native().forward(Inputs(query, key, value, cu_seqlens=torch.tensor(wrong, dtype=torch.int32)), problem)
