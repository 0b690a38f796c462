"""Problems that are too large are refused before they cost anything, in few words that name the limit."""

import json

import numpy as np
import pytest

from dilkit import BlockSparse, Device, GlobalTokens, Pattern, Problem, SlidingWindow, explain
from dilkit.pattern.checks import MOST_BRANCHES
from dilkit.pattern.kinds.global_tokens import MOST_POSITIONS

LONG, LONGER = 10**3999, 10**5000
"""Python writes the first; of the second it says that it does not write integers of more than 4,300 digits."""

WORDS = {
    "a length": lambda value: Pattern([value], [1]),
    "a length in JSON": lambda value: Pattern.from_json(f'{{"segment_lengths":[1{"0" * 4000}],"dilation_rates":[1]}}'),
    "lengths": lambda value: Pattern(str(value)[:4000] if value == LONG else "8" * 5000, [1]),
    "a list": lambda value: Pattern([[value] * 9], [1]),
    "a window": SlidingWindow,
    "heads": lambda value: SlidingWindow(4, heads=(0, value)),
    "one head of a shard": lambda value: Pattern([4], [1], head_shard=(0, -value)),
    "an offset": lambda value: Pattern([4], [1], offset=[value] * 9),
    "a field of JSON": lambda value: Pattern.from_json(
        json.dumps({"segment_lengths": [1], "dilation_rates": [1], "x" * 5000: 1})
    ),
    "no pattern": lambda value: Problem(pattern=[value] * 9, seq=8, heads=1, head_dim=8),
    "a device": lambda value: Device("cpu", "x", features=[value] * 9),
    "a backend": lambda value: explain(Problem(pattern=Pattern.dense(), seq=8, heads=1, head_dim=8), ["x" * 5000]),
}


@pytest.mark.parametrize("value", [LONG, LONGER], ids=["long", "longer"])
@pytest.mark.parametrize("call", WORDS.values(), ids=WORDS)
def test_errors_do_not_repeat_a_long_value(call, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(value)
    assert len(str(caught.value)) < 600
    assert "set_int_max_str_digits" not in str(caught.value)


def test_as_many_as_may_be_are_taken():
    assert len(Pattern([16] * MOST_BRANCHES, [1] * MOST_BRANCHES).branches) == MOST_BRANCHES
    assert GlobalTokens(range(MOST_POSITIONS)) == GlobalTokens(MOST_POSITIONS)


def test_more_random_blocks_than_there_are_fill_the_rows_and_end():
    assert BlockSparse.bigbird(9, 4, random_blocks=10**9).layout.array().all()
    assert np.array_equal(*(BlockSparse.bigbird(40, 4, random_blocks=n).layout.array() for n in (40, 41)))
