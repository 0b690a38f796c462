"""The index tables of a plan against the definition, computed row by row in plain Python."""

import threading
from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilkit import _plan, plan
from dilkit.pattern import WHOLE_SEQUENCE, Pattern, PatternError

PRIMES = (2, 3, 7, 13, 31, 61, 97)


@pytest.fixture(autouse=True)
def _fresh_cache():
    plan.cache_clear()
    yield
    plan.cache_clear()


def by_definition(seq: int, length: int, rate: int, offset: int) -> list[list[int]]:
    """The kept rows of each segment, one row at a time."""
    segments: list[list[int]] = [[] for _ in range(0, seq, length)]
    for row in range(seq):
        if (row % length) % rate == offset:
            segments[row // length].append(row)
    return segments


def assert_is_the_definition(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> None:
    made = plan.plan_of(pattern, seq, heads, kv_heads)
    assert (made.seq, made.heads, made.kv_heads) == (seq, heads, kv_heads)
    assert made.nbytes == sum(table.nbytes for table in made.branches)
    for branch, table in zip(pattern.branches, made.branches, strict=True):
        offsets = [
            pattern.head_offset(branch.dilation_rate, h * kv_heads // heads, kv_heads) if branch.serves(h) else None
            for h in range(heads)
        ]
        assert [table.offsets[i] if i >= 0 else None for i in table.head_offset] == offsets
        assert table.offsets.tolist() == sorted(set(offsets) - {None})
        expected = [by_definition(seq, table.segment_length, branch.dilation_rate, offset) for offset in table.offsets]
        got = [[table.kept(o, s).tolist() for s in range(table.segments)] for o in range(len(table.offsets))]
        assert got == expected
        assert_is_csr(table)


def assert_is_csr(table: plan.BranchTable) -> None:
    assert table.pointers.shape == (len(table.offsets), table.segments + 1)
    assert table.pointers[0, 0] == 0
    assert table.pointers[-1, -1] == len(table.rows)
    assert (table.pointers[1:, 0] == table.pointers[:-1, -1]).all()
    assert (np.diff(table.pointers, axis=1) >= 0).all()


def count_from(made: plan.Plan) -> torch.Tensor:
    """The count matrix that the tables stand for: 1 for each pair of each problem of each head."""
    count = torch.zeros(made.heads, made.seq, made.seq, dtype=torch.int32)
    for table in made.branches:
        for head, o in enumerate(table.head_offset.tolist()):
            for s in range(table.segments if o >= 0 else 0):
                rows = torch.tensor(table.kept(o, s), dtype=torch.int64)
                count[head, rows[:, None], rows] += 1
    return count


@st.composite
def cases(draw):
    """(pattern, seq, heads, kv_heads): ragged tails, w > n, rate = segment, heads < rate, head ranges and grouped heads."""
    kv_heads, group = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    heads = kv_heads * group
    lengths = draw(st.lists(st.integers(1, 40) | st.just(WHOLE_SEQUENCE), min_size=1, max_size=3))
    rates = [draw(st.integers(1, min(length, 12)) | st.just(length)) for length in lengths]
    ranges = st.tuples(st.integers(0, heads - 1), st.integers(1, heads)).filter(lambda r: r[0] < r[1])
    served = [draw(st.none() | ranges) for _ in lengths]
    offset = draw(st.sampled_from(["modulo", "block"]))
    seq = draw(st.integers(0, 90) | st.sampled_from(PRIMES))
    return Pattern(lengths, rates, offset=offset, heads=served), seq, heads, kv_heads


@given(cases())
@example((Pattern([8], [8]), 20, 4, 4))  # rate = segment, heads < rate, a short tail
@example((Pattern([64], [4]), 7, 8, 4))  # w > n, two query heads to a key/value head
@example((Pattern([16, 32], [4, 8], offset="block", heads=[(0, 1), (1, 6)]), 61, 6, 6))
@example((Pattern([WHOLE_SEQUENCE], [WHOLE_SEQUENCE]), 97, 3, 3))
@example((Pattern([1], [1]), 0, 1, 1))
@settings(deadline=None)
def test_tables_are_the_definition(case):
    assert_is_the_definition(*case)


@given(cases())
@settings(deadline=None, max_examples=60)
def test_the_pairs_of_all_problems_are_the_count(case):
    pattern, seq, heads, kv_heads = case
    assert torch.equal(count_from(plan.plan_of(*case)), pattern.count(seq, heads, kv_heads=kv_heads))


@pytest.mark.parametrize("seq", [0, 1, *PRIMES])
@pytest.mark.parametrize("offset", ["modulo", "block"])
def test_sequences_of_any_length(seq, offset):
    assert_is_the_definition(Pattern([4, 16, 32], [1, 4, 16], offset=offset), seq, 8, 8)


def test_an_offset_that_keeps_nothing_in_a_short_segment_has_an_empty_range():
    table = plan.plan_of(Pattern([8], [4]), 10, 4).branches[0]
    assert table.offsets.tolist() == [0, 1, 2, 3]
    assert table.pointers.tolist() == [[0, 2, 3], [3, 5, 6], [6, 8, 8], [8, 10, 10]]
    assert table.rows.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 3, 7]


def test_grouped_heads_share_the_offset_of_their_key_value_head():
    tables = plan.plan_of(Pattern([16], [4]), 16, 8, 4).branches[0]
    assert tables.head_offset.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_only_offsets_in_use_have_rows():
    table = plan.plan_of(Pattern([64], [16], heads=[(2, 4)]), 64, 6).branches[0]
    assert table.offsets.tolist() == [2, 3]
    assert table.head_offset.tolist() == [-1, -1, 0, 1, -1, -1]
    assert len(table.rows) == 2 * 64 // 16


def test_rows_are_int32_below_2_to_the_31_tokens_and_int64_from_there():
    pattern = Pattern([2**30], [2**29])
    below, above = (plan.plan_of(pattern, seq, 2).branches[0] for seq in (2**31 - 1, 2**31 + 1))
    assert (below.rows.dtype, below.pointers.dtype) == (np.int32, np.int32)
    assert (above.rows.dtype, above.pointers.dtype) == (np.int64, np.int64)
    steps = [k * 2**29 for k in range(4)]
    assert below.rows.tolist() == [*steps, *(row + 1 for row in steps)]
    assert above.rows.tolist() == [*steps, 2**31, *(row + 1 for row in steps)]


def test_arrays_and_plans_are_read_only():
    made = plan.plan_of(Pattern([4], [2]), 9, 2)
    table = made.branches[0]
    for array in (table.rows, table.pointers, table.offsets, table.head_offset, table.kept(0, 0)):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(FrozenInstanceError):
        made.seq = 3
    with pytest.raises(FrozenInstanceError):
        table.rows = None


def test_equal_arguments_share_one_plan_and_different_ones_do_not():
    pattern = Pattern([4, 8], [1, 2])
    made = plan.plan_of(pattern, 32, 4)
    assert plan.plan_of(Pattern([4, 8], [1, 2]), 32, 4, 4) is made
    others = [(pattern, 33, 4, 4), (pattern, 32, 8, 4), (pattern, 32, 4, 2), (Pattern([4, 8], [1, 1]), 32, 4, 4)]
    assert len({id(made), *(id(plan.plan_of(*arguments)) for arguments in others)}) == 5
    assert plan.cache_info()[:3] == (1, 5, 5)
    assert plan.cache_info().bytes >= made.nbytes


def test_a_plan_above_the_limit_is_made_but_not_kept(monkeypatch):
    monkeypatch.setenv("DILKIT_CACHE_BYTES", "4096")
    assert plan.plan_of(Pattern.dense(), 4096, 1).nbytes > 4096
    assert plan.cache_info().entries == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("dense", 8, 1), TypeError, "pattern='dense' is a str; a dilkit.Pattern is needed"),
        ((Pattern.dense(), -1, 1), ValueError, "seq=-1 must be at least 0"),
        ((Pattern.dense(), 8.0, 1), TypeError, "seq=8.0 is a float"),
        ((Pattern.dense(), 8, 0), ValueError, "heads=0 must be at least 1"),
        ((Pattern.dense(), 8, True), TypeError, "heads=True is a bool"),
        ((Pattern.dense(), 8, 6, 4), PatternError, "kv_heads=4 must divide heads=6"),
        ((Pattern.dense(), 8, 6, 0), ValueError, "kv_heads=0 must be at least 1"),
        ((Pattern([4], [1], heads=[(0, 3)]), 8, 2), PatternError, "reaches past the 2 heads"),
    ],
)
def test_arguments_that_cannot_be_are_named(arguments, error, words):
    with pytest.raises(error) as caught:
        plan.plan_of(*arguments)
    assert words in str(caught.value)


def test_a_branch_of_an_unknown_kind_is_refused_by_name():
    @dataclass(frozen=True)
    class Window:
        kind: ClassVar[str] = "window"

    pattern = Pattern.dense()
    pattern.__dict__["branches"] = (Window(),)
    with pytest.raises(ValueError, match=r"Window\(\) is of kind 'window'; index tables are known for dilated_segment"):
        plan.plan_of(pattern, 8, 1)


def test_other_threads_run_while_rows_are_written():
    """This thread catches the rows half written, which it could never do if the filling thread held the lock throughout."""
    tokens = 2**25
    rows, pointers, offsets = np.empty(tokens, np.int32), np.empty((1, 2), np.int32), np.zeros(1, np.int64)
    half_written = False
    for _ in range(100):
        rows[0] = rows[-1] = -1
        thread = threading.Thread(target=_plan.fill_segments, args=(rows, pointers, offsets, tokens, tokens, 1))
        thread.start()
        while thread.is_alive():
            half_written |= bool(rows[0] == 0 and rows[-1] == -1)
        thread.join()
        if half_written:
            break
    assert half_written
    assert rows[-1] == tokens - 1
