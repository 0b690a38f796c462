"""Strategies of the arguments of steps: plain data."""

import json
from dataclasses import replace
from math import prod
from typing import Any

from fuzz.calls import HOOKS, LAYOUTS, MASK_LAYOUTS, OF_PACKED, SAME_VALUES, WAYS, Call
from fuzz.wrong_calls import ARGUMENTS, BESIDE_OTHERS, OF_PATTERN, TENSOR
from helpers.strategies import branches, has_tokens, heads_and_groups, mixes, neighborhoods, patterns, presets
from hypothesis import strategies as st

from dilkit import Neighborhood, Pattern
from dilkit.orders.checks import CURVES
from dilkit.problem import DTYPES, STORED
from dilkit.registry import backends
from dilkit.testing.bias_forms import BIAS_FORMS, CACHED_BIASES
from dilkit.testing.problems import Case

BACKENDS = ("native", "native", "native", "sdpa", "reference")
MASKS = ("none", "none", "random", "left", "right", "element", "all")
SINKS = ("none", "none", "random", "of some heads")
VALUES = (*["normal"] * 6, *["constant value"] * 2, *["ignored NaN"] * 2, "huge")
USUAL = (None, None, 1.0, 0.0, -0.3)
SCALES = (*USUAL * 6, *(10.0**power for power in range(3, 28, 4)))
RARELY_COMPILED = (*[way for way in WAYS if not way.startswith("compiled")] * 8, "compiled", "compiled dynamic")
Data = dict[str, Any]


many_branches = st.lists(branches(), min_size=4, max_size=40).map(lambda chosen: Pattern(*zip(*chosen, strict=True)))


@st.composite
def cases(draw: st.DrawFn, longest: int, other_kinds: int) -> Case:
    """Draw a case of up to `longest` tokens; 8 of 8 + 3 * `other_kinds` patterns have segments."""
    heads, kv_heads = draw(heads_and_groups())
    kinds = [*[patterns(heads, kv_heads)] * 6, st.just(Pattern.dense()), many_branches]
    kinds += [mixes(heads, kv_heads, longest), neighborhoods(heads, longest), presets(heads, longest)] * other_kinds
    values = draw(st.sampled_from(VALUES if other_kinds < 2 else VALUES[:-1]))
    pattern = draw(st.sampled_from(kinds).flatmap(lambda x: x))
    seq = pattern.max_seq if on_a_grid(pattern) else draw(st.integers(1, 20) | st.integers(1, longest))
    return Case(
        feature="fuzz",
        variant=str(draw(st.integers(0, 99))),
        pattern=pattern,
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 3, 8, 16, 17, 24, 40, 64, 128, 200])),
        batch=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(DTYPES)),
        is_causal=draw(st.booleans()) or not has_tokens(pattern, seq),
        mask=draw(st.sampled_from(MASKS[2:] if values == "ignored NaN" else MASKS)),
        values=values,
        sink=draw(st.sampled_from(SINKS)),
        scale=draw(st.sampled_from(SCALES if other_kinds < 2 and values != "huge" else USUAL)),
    )


@st.composite
def calls(
    draw: st.DrawFn,
    longest: int = 90,
    ways: tuple[str, ...] = RARELY_COMPILED,
    other_kinds: int = 1,
    dropout: tuple[float, ...] = (0.0,),
    may_pack: bool = False,
    may_score: bool = False,
) -> Data:
    case = draw(cases(longest, other_kinds))
    if case.mask == "none" and (may_pack or ways == RARELY_COMPILED) and draw(st.booleans()):
        length = st.just(case.seq) if on_a_grid(case.pattern) else st.integers(0, 3) | st.integers(0, 40)
        lengths = tuple(draw(st.lists(length, min_size=1, max_size=12).filter(any)))
        case, ways = replace(case, lengths=lengths, seq=sum(lengths), batch=1), OF_PACKED if ways == RARELY_COMPILED else ways
    else:
        case = replace(case, dropout_p=draw(st.sampled_from(dropout)))
    layout = st.sampled_from(SAME_VALUES if case.values == "ignored NaN" else tuple(LAYOUTS))
    way = draw(st.sampled_from(ways))
    if may_score and way == "function" and case.values == "normal" and draw(st.booleans()):
        case = replace(case, bias=draw(st.sampled_from(["none", *BIAS_FORMS])), softcap=draw(st.sampled_from([0.0, 0.7, 5.0])))
    backend = draw(st.sampled_from(able(case)))
    promised = backend == "native" or not (case.values == "huge" or (case.scale or 0) > 1)  # what gradients of large scores are
    wants = st.sampled_from([(True,) * 3, (True,) * 3]) | st.tuples(*[st.booleans()] * 3)
    one = Call(
        case=case,
        layouts=(draw(layout), draw(layout), draw(layout), draw(layout)),
        wants=draw(wants) if promised else (False,) * 3,
        backend=backend,
        way=way,
        hooks=draw(st.sampled_from(HOOKS[:1] if way == "checkpoint" else HOOKS)),
        through_lse=draw(st.booleans()),
        mask_layout=draw(st.sampled_from(list(MASK_LAYOUTS))),
    )
    return one.to_data()


def on_a_grid(pattern: Pattern) -> bool:
    return any(isinstance(branch, Neighborhood) for branch in pattern.branches)


def able(case: Case) -> list[str]:
    known, problem = backends(), case.problem()
    return [name for name in BACKENDS if not known[name].refusals(problem)]


plain_calls = calls(longest=30, ways=("function",), other_kinds=0)
calls_of_modules = plain_calls.filter(lambda call: call["case"]["values"] != "huge")
"""Without rows that projections make larger yet."""
wrong_arguments = st.sampled_from([(name, how) for name, changes in ARGUMENTS.items() for how in changes])
wrong_on_a_rank = wrong_arguments.filter(lambda wrong: wrong[0] in ("query", "key", "value", "pattern", "key_padding_mask"))
wrong_tensors = st.sampled_from([name for name in (*TENSOR, *BESIDE_OTHERS) if name != "meta"])
"""On "meta" an operator computes the shapes alone, as torch does."""
settings = st.sampled_from(
    [
        *[("DILKIT_CACHE_BYTES", size) for size in ("0", "1500", "5000", "100000", "")],
        *[("DILKIT_CPU_ISA", name) for name in ("generic", "")],
        *[("threads", number) for number in ("1", "2", "5")],
    ]
)


@st.composite
def calls_with_cuts(draw: st.DrawFn, calls: st.SearchStrategy[Data]) -> tuple[Data, list[int]]:
    call = draw(calls.filter(lambda call: call["case"]["seq"] > 1))
    seq = call["case"]["seq"]
    if draw(st.sampled_from([*[True] * 15, False])):
        inner = draw(st.lists(st.integers(1, seq - 1), min_size=1, max_size=min(6, seq - 1), unique=True))
    else:
        inner = draw(st.lists(st.integers(0, seq), min_size=1, max_size=6))
    return call, [0, *sorted(inner), seq]


calls_of_kinds = calls(longest=120, ways=("function",), other_kinds=6, dropout=(0.0, 0.0, 0.0, 0.3), may_pack=True)


actions = st.lists(
    st.tuples(
        st.sampled_from(["rows", "rows", "steps", "segment", "draft", "back", "move"]),
        st.integers(0, 2),
        st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9, 20, 70]),
    ),
    max_size=30,
)


@st.composite
def decodings(draw: st.DrawFn) -> Data:
    call = draw(calls(longest=draw(st.sampled_from([60, 60, 200])), ways=("function",), other_kinds=4))
    call["case"] |= dict(
        bias=draw(st.sampled_from([*["none"] * len(CACHED_BIASES), *CACHED_BIASES])),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.7, 5.0])),
    )
    return dict(
        call=call,
        actions=draw(actions),
        page_rows=draw(st.integers(1, 9)),
        rollback=draw(st.sampled_from([0, 1, 3, 3, 8, 20])),
        stored=draw(st.sampled_from([None, None, None, *STORED[call["case"]["dtype"]]])),
        pages=draw(st.sampled_from([None, None, None, 40])),
    )


number = st.sampled_from([*range(13)] * 6 + [-3, -1, 2**40, 2**62, 2**62 + 1, 2.5, "3", None])
pair = st.lists(number, min_size=2, max_size=2)
own_kinds = st.one_of(
    st.tuples(st.just("Reach"), st.tuples(number, number, number)),
    st.tuples(st.just("Turns"), st.tuples(number, number)),
    st.tuples(st.just("Posts"), st.tuples(pair, pair)),
    st.tuples(st.just("Gap"), st.tuples(st.sampled_from(["window", "segments", "tokens"]), pair, pair)),
)
"""Kinds of `helpers/odd_kinds.py` with numbers that their forms may or may not have."""

texts = st.text(max_size=6) | st.sampled_from(["", ";", "{", "}", "null", "1e999", "[]", "-1", "9" * 30, "\x00", '"', "NaN"])
junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@st.composite
def pattern_fields(draw: st.DrawFn) -> Data:
    fields = json.loads(draw(heads_and_groups().flatmap(lambda heads: patterns(*heads))).to_json())
    for name in draw(st.lists(st.sampled_from(OF_PATTERN), max_size=2)):
        fields[name] = draw(junk | st.lists(st.integers(-3, 9), max_size=4) | st.lists(st.lists(st.integers(-2, 5), max_size=3)))
    return fields


numbers = st.integers(-3, 40) | st.sampled_from([2**31, 2**62, 2**63, -(2**63)])
devices = st.sampled_from(["sm_61", "sm_90", "sm_120"]) | junk


@st.composite
def problem_fields(draw: st.DrawFn) -> Data:
    fields = dict(seq=draw(numbers), heads=draw(numbers), head_dim=draw(numbers), dtype=draw(st.sampled_from(DTYPES)))
    names = ["batch", "kv_heads", "seq", "heads", "head_dim", "dtype", "is_causal", "key_padding_mask", "requires_grad", "scale"]
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        fields[name] = draw(numbers | junk)
    return fields


sides = st.lists(st.integers(1, 9), min_size=2, max_size=3).filter(lambda shape: prod(shape) <= 90)
curves = st.lists(st.sampled_from(CURVES), min_size=1, max_size=3)
permutations = st.integers(0, 20).flatmap(lambda n: st.permutations(range(n))) | st.lists(st.integers(-2, 9), max_size=8)


@st.composite
def clouds(draw: st.DrawFn) -> Data:
    """Points in two or three dimensions, now and then in none that there is."""
    ndim, bits = draw(st.sampled_from([2, 2, 3, 3, 1, 4])), draw(st.none() | st.integers(1, 31) | st.integers(-1, 70))
    dtype = draw(st.sampled_from(["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32"]))
    small = st.integers(0, 2 ** min(max(bits or 8, 1), 7) - 1)
    coordinate = draw(st.sampled_from([small, small, numbers]))
    coords = draw(st.lists(st.lists(coordinate, min_size=ndim, max_size=ndim), max_size=30))
    return dict(coords=coords, bits=bits, curve=draw(st.sampled_from(["hilbert", "morton"])), dtype=dtype)


@st.composite
def grids(draw: st.DrawFn) -> Data:
    """The arguments of a token order: a small grid, and now and then something that is none."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3) | st.lists(st.integers(-2, 6), max_size=4))
    options: Data = {}
    if draw(st.booleans()):
        options["tile"] = draw(st.none() | st.lists(st.integers(0, 5), max_size=3))
    if draw(st.booleans()):
        options["extra_tokens"] = draw(st.integers(-1, 5))
    return dict(shape=shape, curve=draw(st.sampled_from([*CURVES, "none"])), options=options)
