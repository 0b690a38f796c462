"""What is too large is refused before it costs anything, in few words that name the limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count, repeat
from typing import Any

import numpy as np
import pytest

from dilkit import BlockSparse, Device, GlobalTokens, Pattern, PatternError, Problem, SlidingWindow, explain
from dilkit.pattern.checks import MOST_BRANCHES
from dilkit.pattern.kinds.global_tokens import MOST_POSITIONS

LONG, LONGER = 10**3999, 10**5000
"""Python writes the first; of the second it says that it does not write integers of more than 4,300 digits."""

WORDS: dict[str, Callable[[Any], Any]] = {
    "a length": lambda value: Pattern([value], [1]),
    "a length in JSON": lambda value: Pattern.from_json(f'{{"segment_lengths":[1{"0" * 4000}],"dilation_rates":[1]}}'),
    "lengths": lambda value: Pattern(str(value)[:4000] if value == LONG else "8" * 5000, [1]),
    "a list": lambda value: Pattern([[value] * 9], [1]),
    "a window": SlidingWindow,
    "heads": lambda value: SlidingWindow(4, heads=(0, value)),
    "one head of a shard": lambda value: Pattern([4], [1], head_shard=(0, -value)),
    "a grid": lambda value: Pattern.natten((value, 3), 3),
    "a position": lambda value: GlobalTokens([value]),
    "an offset": lambda value: Pattern([4], [1], offset=[value] * 9),
    "a field of JSON": lambda value: Pattern.from_json(
        json.dumps({"segment_lengths": [1], "dilation_rates": [1], "x" * 5000: 1})
    ),
    "a problem": lambda value: Problem(pattern=Pattern.dense(), seq=value, heads=1, head_dim=8),
    "no pattern": lambda value: Problem(pattern=[value] * 9, seq=8, heads=1, head_dim=8),
    "a device": lambda value: Device("cpu", "x", features=[value] * 9),
    "a backend": lambda value: explain(Problem(pattern=Pattern.dense(), seq=8, heads=1, head_dim=8), ["x" * 5000]),
}


@pytest.mark.parametrize("value", [LONG, LONGER], ids=["long", "longer"])
@pytest.mark.parametrize("call", WORDS.values(), ids=WORDS)
def test_errors_do_not_repeat_a_long_value(call: Callable[[Any], Any], value: int) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(value)
    assert len(str(caught.value)) < 600
    assert "set_int_max_str_digits" not in str(caught.value)


MANY: dict[str, Callable[[], Any]] = {
    "lists": lambda: Pattern([16] * 2000, [1] * 2000),
    "without an end": lambda: Pattern(repeat(16), count(1)),
    "branches": lambda: Pattern.of(*[SlidingWindow(4)] * 2000),
    "JSON of lists": lambda: Pattern.from_json(json.dumps(dict(segment_lengths=[16] * 2000, dilation_rates=[1] * 2000))),
    "JSON of branches": lambda: Pattern.from_json(json.dumps(dict(branches=[None] * 2000))),  # which are not looked at
}


@pytest.mark.parametrize("call", MANY.values(), ids=MANY)
def test_a_pattern_has_a_thousand_branches_at_most(call: Callable[[], Any]) -> None:
    with pytest.raises(
        PatternError, match=r"(segment_lengths|branches) has (2,000|more than 1,024) entries.*at most 1,024 branches"
    ):
        call()
    assert len(Pattern([16] * MOST_BRANCHES, [1] * MOST_BRANCHES).branches) == MOST_BRANCHES


def test_a_million_positions_at_most_are_listed() -> None:
    with pytest.raises(PatternError, match=r"tokens has more than 1,048,576 positions"):
        GlobalTokens(count())
    assert GlobalTokens(range(MOST_POSITIONS)) == GlobalTokens(MOST_POSITIONS)


LAYOUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "bigbird": (lambda: BlockSparse.bigbird(100_000, 1), r"blocks=100000 .* 1 x 100,000 x 100,000 = 10,000,000,000 bits"),
    "of a sequence": (lambda: Pattern.bigbird(10**7, 1), r"blocks=10000000 .* bits"),
    "of heads": (lambda: BlockSparse.bigbird(1000, 1, heads=10**6), r"1,000,000 x 1,000 x 1,000 = 1,000,000,000,000 bits"),
    "local and global": (lambda: BlockSparse.local_global(10**6, 1), r"blocks=1000000 .* bits"),
}


@pytest.mark.parametrize(("call", "said"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_that_no_memory_holds_is_not_begun(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(PatternError, match=rf"{said}; at most 2,147,483,648 are possible: give fewer, larger blocks"):
        call()


def test_more_random_blocks_than_there_are_fill_the_rows_and_end() -> None:
    assert BlockSparse.bigbird(9, 4, random_blocks=10**9).layout.array().all()
    assert np.array_equal(*(BlockSparse.bigbird(40, 4, random_blocks=n).layout.array() for n in (40, 41)))


def test_a_field_that_is_there_twice_is_no_pattern() -> None:
    with pytest.raises(PatternError, match="'segment_lengths' is there twice"):
        Pattern.from_json('{"segment_lengths":[4],"segment_lengths":[8],"dilation_rates":[1]}')
