"""Random patterns with heads."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from dilkit import (
    BlockSparse,
    DilatedSegment,
    Documents,
    GlobalTokens,
    Intervals,
    Neighborhood,
    Pattern,
    PatternError,
    Prefix,
    SlidingWindow,
    Strided,
)
from dilkit.pattern import Branch

Heads = tuple[int, int]


@st.composite
def heads_and_groups(draw: st.DrawFn) -> Heads:
    kv_heads = draw(st.integers(1, 4))
    return kv_heads * draw(st.integers(1, 3)), kv_heads


@st.composite
def branches(draw: st.DrawFn) -> tuple[int, int]:
    """Draw a segment length and a rate it allows; branches are independent, and may exceed the sequence."""
    length = draw(st.integers(1, 24))
    return length, draw(st.integers(1, min(length, 6)))


@st.composite
def patterns(draw: st.DrawFn, heads: int, kv_heads: int) -> Pattern:
    """Draw a pattern for these heads, now and then with ranges of heads or for a shard."""
    chosen = draw(st.lists(branches(), min_size=1, max_size=3))
    starts = st.integers(0, heads - 1)
    ranges = st.none() | starts.flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, heads)))
    shard = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + kv_heads + pair[1]))
    overlap, tail = draw(st.sampled_from([("count", "exact"), ("count", "zeros"), ("once", "exact")]))
    return Pattern(
        *zip(*chosen, strict=True),
        offset=draw(st.sampled_from(["modulo", "block"])),
        overlap=overlap,
        tail=tail,
        heads=draw(st.none() | st.lists(ranges, min_size=len(chosen), max_size=len(chosen))),
        head_shard=draw(st.none() | shard),
    )


@st.composite
def patterns_with_heads(draw: st.DrawFn) -> tuple[Pattern, Heads]:
    heads = draw(heads_and_groups())
    return draw(patterns(*heads)), heads


@st.composite
def branches_of_any_kind(draw: st.DrawFn, heads: int, in_model: int, tokens: int) -> Branch:
    """A branch for so many query heads: windows and strides shorter and longer than the sequences of tests, even and odd.

    Layouts of blocks are for `tokens` at least, of which the last block may have fewer than the others.
    """
    starts = st.integers(0, heads - 1)
    served = draw(st.none() | starts.flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, heads))))
    kinds = [DilatedSegment, SlidingWindow, GlobalTokens, Strided, BlockSparse, Documents, Prefix, Intervals]
    kind, size = draw(st.sampled_from(kinds)), draw(st.integers(1, 24))
    if kind is GlobalTokens:
        chosen = draw(st.integers(1, 4) | st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))
        return GlobalTokens(chosen, draw(st.sampled_from(["both", "read"])), heads=served)
    if kind in (Strided, Prefix):
        return kind(size, heads=served)
    if kind is Documents:
        return Documents([*draw(st.lists(st.integers(1, 24), max_size=4)), tokens], heads=served)
    if kind is Intervals:
        random = np.random.default_rng(draw(st.integers(0, 99)))
        first = random.integers(-2, tokens, (tokens, draw(st.integers(1, 2))))
        return Intervals(first, first + random.integers(-3, size, first.shape), heads=served)
    if kind is BlockSparse:
        block_size = draw(st.integers(3, 17))
        shape = draw(st.sampled_from([1, in_model])), -(-tokens // block_size), -(-tokens // block_size)
        random = np.random.default_rng(draw(st.integers(0, 99)))
        return BlockSparse(random.random(shape) < draw(st.sampled_from([0.2, 0.7])), block_size, heads=served)
    rate = draw(st.integers(1, min(size, 6)))
    if kind is SlidingWindow and draw(st.booleans()):  # the sides differ, or one is open
        return SlidingWindow(dilation_rate=rate, before=size, after=draw(st.integers(-1, 24)), heads=served)
    return kind(size, rate, heads=served)


def has_tokens(pattern: Pattern, seq: int) -> bool:
    """True if a sequence has all named tokens, which calls that are not causal need."""
    try:
        pattern.check_tokens(seq)
    except PatternError:
        return False
    return True


@st.composite
def mixes(draw: st.DrawFn, heads: int, kv_heads: int, tokens: int = 30) -> Pattern:
    """A pattern of branches of any kinds for these heads and sequences of up to `tokens` tokens."""
    shard = draw(st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda pair: (pair[0], sum(pair) + kv_heads)))
    in_model = heads // kv_heads * (kv_heads if shard is None else shard[1])
    chosen = draw(st.lists(branches_of_any_kind(heads, in_model, tokens), min_size=1, max_size=4))
    overlap, tail = draw(st.sampled_from([("count", "exact"), ("count", "zeros"), ("once", "exact")]))
    rules = dict(offset=draw(st.sampled_from(["modulo", "block"])), head_shard=shard)
    return Pattern.of(*chosen, overlap=overlap, tail=tail, **rules)


@st.composite
def mixes_with_heads(draw: st.DrawFn, tokens: int = 30) -> tuple[Pattern, Heads]:
    heads = draw(heads_and_groups())
    return draw(mixes(*heads, tokens)), heads


@st.composite
def neighborhoods(draw: st.DrawFn, heads: int, tokens: int = 90) -> Pattern:
    shape, left = [], tokens
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, left)))
        left //= shape[-1]
    sizes = [draw(st.integers(1, min(size, 11))) for size in shape]
    shared = [draw(st.one_of(st.just(1), st.integers(1, width))) for width in sizes]
    causal = [draw(st.booleans()) for _ in shape]
    steps = [draw(st.integers(1, min(size // width, 4))) for size, width in zip(shape, sizes, strict=True)]
    served, border = draw(st.sampled_from([None, (0, 1), (0, heads)])), draw(st.sampled_from(["move", "cut"]))
    if border == "cut":  # which may reach beyond a grid
        steps = [step * draw(st.integers(1, 3)) for step in steps]
    branch = Neighborhood(shape, sizes, steps, served, stride=shared, causal=causal, border=border)
    return Pattern.of(branch, *draw(st.sampled_from([(), (SlidingWindow(3),), (branch,)])))


@st.composite
def presets(draw: st.DrawFn, heads: int, tokens: int) -> Pattern:
    size, few = draw(st.integers(1, 24)), draw(st.integers(1, 4))
    named: list[Callable[[], Pattern]] = [
        lambda: Pattern.mistral(size),
        lambda: Pattern.streaming_llm(size, few),
        lambda: Pattern.longformer(2 * size, few),
        lambda: Pattern.bigbird(tokens, size, random_blocks=few, seed=size, heads=draw(st.sampled_from([1, heads]))),
        lambda: Pattern.sparse_transformer(size),
    ]
    return draw(st.sampled_from(named))()
