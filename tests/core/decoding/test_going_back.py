"""Rollback, beams and saved states of a `DilatedCache`."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import Tensor

from dilkit import DilatedCache, GlobalTokens, Pattern, SlidingWindow
from dilkit.decoding.sequence_rows import StepSpans
from dilkit.oracle import oracle_attention

PATTERN = Pattern([4, 12], [1, 3])
Rows = tuple[Tensor, ...]


def rows(count: int, heads: int = 4, kv_heads: int = 2, batch: int = 2) -> Rows:
    return tuple(torch.randn(batch, count, n, 4, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))


class Follower:
    """A cache, and all rows that it has seen."""

    def __init__(self, pattern: Pattern, heads: int, kv_heads: int, rollback: int):
        self.cache, self.sizes = DilatedCache(pattern, kv_heads, rollback=rollback), (heads, kv_heads)
        self.all = rows(0, *self.sizes)

    def attend(self, count: int):
        new, before = rows(count, *self.sizes, batch=len(self.all[0])), self.cache.seen
        self.all = tuple(torch.cat(pair, 1) for pair in zip(self.all, new, strict=True))
        exact, _ = oracle_attention(*self.all, self.cache.pattern, is_causal=True)
        torch.testing.assert_close(self.cache.attend(*new), exact[:, before:])

    def crop(self, length: int) -> bool:
        try:
            self.cache.crop(length)
        except ValueError:
            return False
        self.all = tuple(x[:, :length] for x in self.all)
        return True


def test_the_advice_counts_from_the_longest_length():
    """A window of 5 has tokens from 20 - 3 - 4 on."""
    follower = Follower(Pattern.of(SlidingWindow(5)), 4, 2, rollback=3)
    follower.attend(20)
    assert follower.crop(17)
    follower.attend(1)
    with pytest.raises(
        ValueError, match=r"length=16 needs keys from token 12 on, .* after 20 tokens; a cache with rollback=4 does"
    ):
        follower.cache.crop(16)
    assert follower.crop(17)
    follower.attend(2)
    follower = Follower(PATTERN, 4, 2, rollback=4)
    follower.attend(18)
    with pytest.raises(ValueError, match="rollback can be 4 at most, so attend to the tokens again, or keep a copy"):
        follower.cache.crop(2)


def test_a_step_that_failed_may_be_taken_again(monkeypatch):
    """At the start of a segment, there is room for its first row, but the row is not stored."""
    follower = Follower(PATTERN, 4, 2, rollback=3)
    follower.attend(12)
    with monkeypatch.context() as patch:
        patch.setattr(StepSpans, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            follower.cache.attend(*rows(1))
    assert follower.cache.seen == 12
    follower.attend(1)
    assert follower.crop(10)
    follower.attend(5)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (15, r"length=15 needs keys from token 12 on, .*segments of 4 tokens.* after 18 tokens; a cache with rollback=3 does"),
        (19, "length=19 exceeds the 18 tokens seen"),
        (-1, "length=-1 must be at least 0"),
    ],
)
def test_going_back_too_far_is_refused(length, message):
    follower = Follower(PATTERN, 4, 2, rollback=0)
    follower.attend(18)
    with pytest.raises(ValueError, match=message):
        follower.cache.crop(length)
    assert follower.cache.seen == 18
    follower.attend(3)


@pytest.mark.parametrize("pieces", [(67,), (60, 7), (1,) * 67], ids=["prompt", "chunk", "rows"])
def test_any_place_of_the_open_segment_can_be_cropped_to(pieces):
    """After its last kept token, too, which no later row of it keeps."""
    follower = Follower(Pattern([4], [2]), 4, 2, rollback=0)
    for count in pieces:
        follower.attend(count)
    assert follower.crop(65)
    follower.attend(9)


def test_beams_are_reordered_as_a_whole_or_not_at_all(monkeypatch):
    follower = Follower(PATTERN, 4, 2, rollback=0)
    follower.attend(17)
    select, left = Tensor.index_select, [1, 0]

    def failing(x, *arguments):
        if not left.pop(0):
            raise MemoryError
        return select(x, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "index_select", failing)
        with pytest.raises(MemoryError):
            follower.cache.reorder([1, 0])
    follower.attend(3)


def test_a_cropped_cache_takes_other_tensors_when_it_is_empty():
    cache = DilatedCache(PATTERN, 2)
    cache.attend(*rows(5))
    cache.crop(0)
    new = tuple(x.float() for x in rows(7, batch=3))
    torch.testing.assert_close(cache.attend(*new), oracle_attention(*new, PATTERN, is_causal=True)[0].float())


@pytest.mark.parametrize("indices", [[1, 1, 0], torch.tensor([0], dtype=torch.int32)], ids=["more", "one"])
def test_beams_of_another_number(indices):
    follower = Follower(PATTERN, 4, 2, rollback=3)
    follower.attend(17)
    follower.cache.reorder(indices)
    follower.all = tuple(x[torch.as_tensor(indices)] for x in follower.all)
    assert follower.crop(15)
    follower.attend(20)


def test_rows_of_the_batch_before_are_refused():
    """They have the facts of the last rows, which were of another batch than the cache now has."""
    follower = Follower(PATTERN, 4, 2, 0)
    follower.attend(6)
    follower.attend(1)
    follower.cache.reorder([0, 1, 1])
    with pytest.raises(ValueError, match="these rows have batch=2, but the cache batch=3"):
        follower.cache.attend(*rows(1))


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 2], ValueError, r"indices=\[0, 2\] must be some of the 2 sequences, from 0 to 1"),
        ([-1], ValueError, "must be some of the 2 sequences"),
        ([], ValueError, "must be some of the 2 sequences"),
        (torch.zeros(1, 2).long(), TypeError, r"indices\[0\]=\[0, 0\] is a list; an integer is needed"),
        (torch.tensor([True]), TypeError, r"indices\[0\]=True is a bool"),
        ("01", TypeError, "indices='01' is a str; a sequence of integers is needed"),
        (iter([0]), TypeError, "is a list_iterator; a sequence"),
    ],
)
def test_beams_that_are_not_there(indices, error, message):
    follower = Follower(PATTERN, 4, 2, 0)
    with pytest.raises(ValueError, match="the cache is empty"):
        follower.cache.reorder([0])
    follower.attend(6)
    with pytest.raises(error, match=message):
        follower.cache.reorder(indices)
    follower.attend(3)


@pytest.mark.parametrize("seen", [0, 12, 30])
def test_a_saved_cache_goes_on(seen):
    follower = Follower(PATTERN, 4, 2, rollback=3)
    follower.attend(seen)
    file = io.BytesIO()
    torch.save(follower.cache.state_dict(), file)
    state = follower.cache.state_dict()
    follower.cache.attend(*rows(5))  # the state is a copy
    file.seek(0)
    for saved in (state, torch.load(file, weights_only=True)):
        again = copy.copy(follower)
        again.cache = DilatedCache(PATTERN, 2, rollback=3)
        again.cache.load_state_dict(saved)
        assert again.cache.seen == seen
        again.attend(3)
        assert again.crop(seen)
        again.attend(9)


ZEROS = torch.zeros(2, 2, 2, 4, 4)
KEPT = [torch.zeros(2, heads, 2, 2, 4).double() for heads in (2, 1, 1)]  # two rows each, after 18 tokens
GONE = KEPT[0].clone()
GONE.untyped_storage().resize_(0)
WRONG_STATES = {
    "another pattern": (dict(pattern=Pattern.dense().to_json()), ValueError, "with pattern=.*, but this one has pattern="),
    "kv_heads": (dict(kv_heads=4), ValueError, "state is of a cache with kv_heads=4, but this one has kv_heads=2"),
    "rollback": (dict(rollback=3), ValueError, "state is of a cache with rollback=3"),
    "seen": (dict(seen=-1), ValueError, "state: seen=-1 must be at least 0"),
    "fewer rows": (dict(rows=[x[:, :, :, :1] for x in KEPT]), ValueError, "not what the branch keeps after 18 tokens"),
    "other rows": (dict(seen=23), ValueError, "latest=18, which is not what the branch keeps after 23 tokens"),
    "heads": (dict(heads=3), ValueError, "kv_heads=2 must divide heads=3"),
    "no rows": (dict(rows=[]), TypeError, "rows must be plain tensors"),
    "one branch": (dict(rows=KEPT[:1]), ValueError, "an entry for each of the 3 groups of heads"),
    "other dtypes": (dict(rows=[KEPT[0], *(x.float() for x in KEPT[1:])]), TypeError, "rows must be plain tensors of one dtype"),
    "integers": (dict(rows=[ZEROS.long()] * 3), TypeError, "rows are torch.int64; one of float64"),
    "another batch": (
        dict(rows=[KEPT[0], torch.zeros(2, 1, 3, 2, 4).double(), KEPT[2]]),
        ValueError,
        r"rows has shape \(2, 1, 3, 2, 4\)",
    ),
    "another device": (dict(rows=[KEPT[0], KEPT[1].to("meta"), KEPT[2]]), TypeError, "rows must be plain .* on one device"),
    "a tensor of heads": (dict(kv_heads=torch.ones(2)), TypeError, r"state: kv_heads=tensor\(.* is a Tensor; an integer"),
    "an array of a rollback": (dict(rollback=np.array([0, 0])), TypeError, "state: rollback=array.* is a ndarray; an integer"),
    "bytes of a pattern": (dict(pattern=PATTERN.to_json().encode()), TypeError, "state: pattern is a bytes; the JSON text"),
    "a float of tokens": (dict(seen=18.0), TypeError, "state: seen=18.0 is a float"),
    "no heads": (dict(heads=0), ValueError, "state: heads=0 must be at least 1"),
    "a beginning before the first token": (dict(since=[-4, 4, 4]), ValueError, "state: since=-4 must be at least 0"),
    "a beginning after the open segment's": (
        dict(since=[17, 4, 4]),
        ValueError,
        "since=17, .* not what the branch keeps after 18",
    ),
    "a longest length below that seen": (dict(longest=17), ValueError, "not what the branch keeps after 18 tokens"),
    "one more name": (dict(step=3), TypeError, "state is not what .* returns; missing: ; unknown: step"),
    "sparse rows": (dict(rows=[ZEROS.double().to_sparse()] * 3), TypeError, "rows must be plain tensors"),
    "rows whose memory is gone": (dict(rows=[GONE, *KEPT[1:]]), ValueError, "state: rows has shape .* beyond the 0 bytes"),
    "no tensors": (dict(rows=[KEPT[0], None, None]), TypeError, "rows must be plain tensors of one dtype"),
}


@pytest.mark.parametrize(("change", "error", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_state_of_something_else_is_refused(change, error, message):
    follower = Follower(PATTERN, 4, 2, 0)
    follower.attend(18)
    state = follower.cache.state_dict()
    follower.attend(2)
    with pytest.raises(error, match=message):
        follower.cache.load_state_dict(state | change)
    with pytest.raises(TypeError, match=r"not what DilatedCache.* returns; missing: heads, kv_heads, latest, longest, "):
        follower.cache.load_state_dict({"pattern": "x"})
    with pytest.raises(TypeError, match="state is a list, not what DilatedCache"):
        follower.cache.load_state_dict([state])
    assert follower.cache.seen == 20
    follower.attend(4)


@pytest.mark.parametrize("change", [dict(seen=40), dict(since=[9, 0]), dict(latest=[80, 80]), dict(since=[0, 7])], ids=str)
def test_a_state_of_another_window_or_other_tokens_is_refused(change):
    follower = Follower(Pattern.of(SlidingWindow(5), GlobalTokens(2)), 4, 2, 0)
    for _ in range(11):
        follower.attend(1)
    with pytest.raises(ValueError, match="not what the branch keeps after"):
        follower.cache.load_state_dict(follower.cache.state_dict() | change)


@pytest.mark.parametrize("more", [0, 1])
def test_a_state_without_what_going_back_takes_is_refused(more):
    follower = Follower(PATTERN, 4, 2, rollback=3)
    follower.attend(12)
    follower.attend(more)
    again, state = Follower(PATTERN, 4, 2, rollback=3), follower.cache.state_dict()
    short = dict(rows=[x[:, :, :, 1:] for x in state["rows"]], since=[first + 1 for first in state["since"]])
    with pytest.raises(ValueError, match=r"not what the branch keeps after 1[23] tokens"):
        again.cache.load_state_dict(state | short)
    again.cache.load_state_dict(state)
    again.all = follower.all
    assert again.crop(10)
    again.attend(5)


@pytest.mark.parametrize(
    ("batch", "dtype", "text"),
    [(3, torch.float64, "batch=2, but the cache batch=3"), (2, torch.float32, "the cache dtype=torch.float32")],
)
def test_rows_that_do_not_fit_a_restored_cache_leave_it_as_it_is(batch, dtype, text):
    other, restored = DilatedCache(PATTERN, 2), Follower(PATTERN, 4, 2, 0)
    other.attend(*(x.to(dtype) for x in rows(9, batch=batch)))
    restored.attend(18)
    restored.cache.load_state_dict(other.state_dict())
    before = restored.cache.state_dict()
    with pytest.raises(ValueError, match=text):
        restored.cache.attend(*rows(1))
    after = restored.cache.state_dict()
    assert after["seen"] == 9
    assert all(torch.equal(*pair) for pair in zip(before["rows"], after["rows"], strict=True))
