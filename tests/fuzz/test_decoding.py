"""Every kind of pattern and bias in every cache, by the fuzzer's step."""

import random

import pytest
from fuzz.calls import Call
from fuzz.world import World
from helpers.pairwise import diagonal

from dilkit import BlockSparse, DilatedSegment, Documents, GlobalTokens, Pattern, Prefix, SlidingWindow, Strided
from dilkit.problem import DTYPES, STORED
from dilkit.testing.bias_forms import CACHED_BIASES
from dilkit.testing.problems import Case

SEQ = 40
PATTERNS = {
    "segments": Pattern([6, 10, 21], [1, 3, 5]),
    "nested": Pattern([4, 8], [1, 2]),
    "offsets by block": Pattern([6, 12], [2, 3], offset="block"),
    "once by heads": Pattern([5, 10, 15], [1, 2, 3], overlap="once", heads=[(0, 5), None, (3, 6)]),
    "shard": Pattern([6, 12], [2, 4], head_shard=(3, 11)),
    "dense": Pattern.dense(),
    "sinks": Pattern.streaming_llm(5, sinks=3),
    "tokens that see all": Pattern.of(GlobalTokens([3, 20, 31]), SlidingWindow(17, 4)),
    "blocks": Pattern.of(BlockSparse.bigbird(10, 5, heads=6), Prefix(7, heads=(0, 2))),
    "of all kinds": Pattern.of(DilatedSegment(8, 2), SlidingWindow(5), GlobalTokens([9, 2], "read"), Strided(9)),
    "once": Pattern.of(Strided(4), DilatedSegment(12, 3), SlidingWindow(9, 2), GlobalTokens([1, 17]), overlap="once"),
    "documents": Pattern.of(Documents([9, 4, SEQ - 13]), SlidingWindow(20)),
}


def decode(pattern, seed, actions=None, **given):
    draw, world = random.Random(seed), World()
    fields = dict(dtype=draw.choice(DTYPES), softcap=draw.choice([0.0, 0.7]), sink=draw.choice(["none", "random"]))
    fields |= dict(seq=SEQ, heads=6, kv_heads=3, head_dim=4) | given
    names, numbers = ["rows", "steps", "segment", "draft", "back", "move"], [1, 2, 3, 4, 6, 12]
    actions = actions or [(draw.choice(names), draw.randrange(2), draw.choice(numbers)) for _ in range(5)]
    call = Call(
        case=Case(feature="decoding", variant=str(seed), pattern=pattern, **fields), backend=draw.choice(["native", "reference"])
    ).to_data()
    more = dict(stored=draw.choice([None, *STORED[fields["dtype"]]]), pages=draw.choice([None, 60]), rollback=draw.choice([3, 5]))
    try:
        world.perform(dict(do="decoded", call=call, actions=actions, page_rows=3, **more))
    finally:
        world.close()
    return world.compared


@pytest.mark.parametrize(("name", "bias"), diagonal(PATTERNS, ["none", *CACHED_BIASES]))
def test_steps_are_rows_of_the_whole(name, bias):
    assert decode(PATTERNS[name], len(name), bias=bias) > 5
