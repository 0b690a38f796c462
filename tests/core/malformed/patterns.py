"""Malformed patterns, problems, devices, limits and choices of backends."""

import json
from collections.abc import Callable
from itertools import count, repeat
from typing import Any

import torch
from core.malformed.case import Case, P, made

import dilkit
from dilkit import (
    Backend,
    BlockSparse,
    Device,
    DilatedSegment,
    GlobalTokens,
    Limits,
    Pattern,
    PatternError,
    Problem,
    SlidingWindow,
    register_backend,
)
from dilkit.backends.reference import Reference


def pattern(*args, **options) -> Callable[[], Any]:
    return lambda: Pattern(*args, **options)


def problem(**options) -> Callable[[], Any]:
    return lambda: Problem(**{"pattern": P, "seq": 6, "heads": 4, "head_dim": 8, **options})


def enter(*names) -> Callable[[], Any]:
    return lambda: dilkit.use_backend(*names).__enter__()


def read(**fields) -> Callable[[], Any]:
    return made(Pattern.from_json, json.dumps(fields))


WINDOW, MANY, MOST_BRANCHES = SlidingWindow(4), [16] * 2000, "at most 1,024 branches"
BITS = "bits; at most 2,147,483,648 are possible: give fewer, larger blocks"
TWICE = '{"segment_lengths":[4],"segment_lengths":[8],"dilation_rates":[1]}'

PATTERNS = {
    "too many branches given": Case(pattern([16] * 2000, [1] * 2000), PatternError, "lengths has 2,000 entries", MOST_BRANCHES),
    "branches without an end": Case(pattern(repeat(16), count(1)), PatternError, "lengths has more than 1,024", MOST_BRANCHES),
    "too many branches": Case(made(Pattern.of, *[WINDOW] * 2000), PatternError, "branches has 2,000 entries", MOST_BRANCHES),
    "JSON of too many lists": Case(read(segment_lengths=MANY, dilation_rates=MANY), PatternError, "2,000", MOST_BRANCHES),
    "JSON of too many branches": Case(read(branches=[None] * 2000), PatternError, "2,000", MOST_BRANCHES),
    "JSON of a field twice": Case(made(Pattern.from_json, TWICE), PatternError, "'segment_lengths' is there twice"),
    "too many positions": Case(made(GlobalTokens, count()), PatternError, "tokens has more than 1,048,576 positions"),
    "huge bigbird": Case(made(BlockSparse.bigbird, 100_000, 1), PatternError, "1 x 100,000 x 100,000 = 10,000,000,000", BITS),
    "blocks of a sequence": Case(made(Pattern.bigbird, 10**7, 1), PatternError, "blocks=10000000", BITS),
    "local and global blocks": Case(made(BlockSparse.local_global, 10**6, 1), PatternError, "blocks=1000000", BITS),
    "no branches": Case(pattern([], []), PatternError, "segment_lengths", "empty", "at least one"),
    "unequal lists": Case(pattern([4, 8], [1]), PatternError, "segment_lengths", "2", "dilation_rates", "1"),
    "lengths are a number": Case(pattern(4, [1]), TypeError, "segment_lengths=4", "sequence of integers"),
    "a bool of torch": Case(pattern([4, 8], [1, torch.tensor(True)]), TypeError, "dilation_rates[1]", "bool"),
    "a list of heads": Case(made(SlidingWindow, 4, heads=[0, 1]), TypeError, "=[0, 1] is a list; give range(start, stop)"),
    "a negative rate": Case(pattern([4, 4], [1, -2]), PatternError, "dilation_rates[1]=-2", "from 1"),
    "beyond 64 bits": Case(pattern([2**63], [1]), PatternError, "segment_lengths[0]", "2**63 - 1"),
    "rate above segment": Case(pattern([4], [5]), PatternError, "dilation_rates[0]=5", "segment_lengths[0]=4", "at most"),
    "heads for one of two": Case(pattern([4, 8], [1, 2], heads=[None]), PatternError, "heads has 1", "2 branches"),
    "heads are one range": Case(pattern([4], [1], heads=range(2)), TypeError, "heads=range(0, 2)", "each branch"),
    "a negative head": Case(pattern([4], [1], heads=[(-1, 2)]), PatternError, "heads[0]=(-1, 2)", "0 <= start"),
    "a triple of heads": Case(pattern([4], [1], heads=[(0, 1, 2)]), TypeError, "heads[0]=(0, 1, 2)", "(start, stop)"),
    "heads of floats": Case(pattern([4], [1], heads=[(0.0, 1.0)]), TypeError, "heads[0]=0.0", "integer"),
    "more branches than heads": Case(lambda: Pattern.head_split([4, 8], [1, 2], 1), PatternError, "num_heads=1", "2 branches"),
    "num_heads is a text": Case(lambda: Pattern.head_split([4], [1], "2"), TypeError, "num_heads='2'", "integer"),
    "count of a fraction": Case(lambda: P.count(4.5, 2), TypeError, "seq=4.5", "integer"),
    "count of no heads": Case(lambda: P.count(4, 0), ValueError, "heads=0", "at least 1"),
    "count of too much": Case(lambda: P.count(2**20, 8), PatternError, "seq=1048576", "heads=8", "at most"),
    "flops of heads without end": Case(lambda: P.flops(8, 10**12, 8), PatternError, "heads=1000000000000", "at most"),
    "flops of a negative": Case(lambda: P.flops(-1, 2, 8), ValueError, "seq=-1", "at least 0"),
    "heads are a dict": Case(pattern([4], [1], heads={0: 1}), TypeError, "heads={0: 1}", "sequence"),
    "a shard of other heads": Case(pattern([4], [1], head_shard=(5, 4)), PatternError, "head_shard=(5, 4)", "first < total"),
    "a shard of heads as a text": Case(pattern([4], [1], head_shard="0/4"), TypeError, "head_shard='0/4'", "pair"),
    "causality of a count": Case(lambda: P.count(6, 4, is_causal="x"), TypeError, "is_causal='x'", "True or False"),
    "causality of flops": Case(lambda: P.flops(6, 4, 8, is_causal=1), TypeError, "is_causal=1", "True or False"),
    "flops of a text": Case(lambda: P.flops(6, 4, "8"), TypeError, "head_dim='8'", "integer"),
    "JSON is a dict": Case(lambda: Pattern.from_json({}), TypeError, "text={}", "dict", "to_json"),
    "JSON is no JSON": Case(lambda: Pattern.from_json("{"), PatternError, "text='{'", "not JSON"),
    "JSON of a list": Case(lambda: Pattern.from_json("[]"), PatternError, "text='[]'", "object"),
    "JSON without rates": Case(lambda: Pattern.from_json('{"segment_lengths": [4]}'), PatternError, "dilation_rates"),
    "JSON of another thing": Case(lambda: Pattern.from_json('{"width": 3}'), PatternError, "'width'", "segment_lengths"),
    "JSON without an end": Case(lambda: Pattern.from_json("[" * 100_000), PatternError, "not JSON", "recursion"),
    "JSON of endless digits": Case(lambda: Pattern.from_json("9" * 5000), PatternError, "not JSON", "..."),
    "a segment of nothing": Case(lambda: DilatedSegment(0, 1), PatternError, "segment_length=0", "1 to 2**63 - 1"),
    "a segment below its rate": Case(lambda: DilatedSegment(4, 8), PatternError, "dilation_rate=8", "segment_length=4"),
    "a segment of one head": Case(lambda: DilatedSegment(4, 1, heads=3), TypeError, "heads=3", "pair"),
}

FACTS = {
    "batch below zero": Case(problem(batch=-1), ValueError, "batch=-1", "at least 0"),
    "tensors beyond 64 bits": Case(problem(seq=2**59), ValueError, "seq=576460752303423488", "9223372036854775807 bytes"),
    "seq is a text": Case(problem(seq="6"), TypeError, "seq='6'", "str", "integer"),
    "kv_heads do not divide": Case(problem(kv_heads=3), PatternError, "kv_heads=3", "divide heads=4"),
    "unknown dtype": Case(problem(dtype="int8"), ValueError, "dtype='int8'", "'float32'"),
    "device is a text": Case(problem(device="cuda"), TypeError, "device='cuda'", "str", "Device.assume"),
    "flag is a number": Case(problem(requires_grad=1), TypeError, "requires_grad=1", "True or False"),
    "scale is NaN": Case(problem(scale=float("nan")), ValueError, "scale=nan", "finite"),
    "no capability": Case(lambda: Device.assume("gtx9999"), ValueError, "'gtx9999'", "sm_61"),
    "too old a GPU": Case(lambda: Device.assume("sm_30"), ValueError, "3.0", "5.2", "oldest"),
    "capability is a number": Case(lambda: Device.assume(6.1), TypeError, "6.1", "float", "sm_61"),
    "explain of a pattern": Case(lambda: dilkit.explain(P), TypeError, "problem=", "Pattern", "dilkit.Problem"),
    "use_backend of nothing": Case(enter(), ValueError, "use_backend", "known: "),
    "dtype of the reference": Case(lambda: Reference("int8"), ValueError, "compute_dtype='int8'", "'float64'"),
    "heads beyond the problem": Case(problem(pattern=Pattern([4], [1], heads=[(2, 9)])), PatternError, "(2, 9)", "4 heads"),
    "type of a device": Case(lambda: Device(3, "x"), TypeError, "type=3", "int", "text"),
    "capability of a device": Case(lambda: Device("cuda", "x", "sm_80"), TypeError, "capability='sm_80'", "(8, 0)"),
    "explain for a number": Case(lambda: dilkit.explain(problem()(), 3), TypeError, "backend=3", "int", "name"),
    "use_backend of None": Case(enter(None), TypeError, "use_backend=None", "str"),
}


def limits(**options) -> Callable[[], Any]:
    return lambda: Limits(**options)


def registered(**attributes) -> Callable[[], Any]:
    facts = {"name": "odd", "forward": lambda *args: None, **attributes}
    return lambda: register_backend(type("Odd", (Backend,), facts)())


BACKENDS = {
    "dtypes of torch": Case(limits(dtypes={1.5}), TypeError, "dtypes={1.5}", "set of names"),
    "head_dim is a text": Case(limits(max_head_dim="128"), TypeError, "max_head_dim='128'", "integer"),
    "head_dim below 0": Case(limits(max_head_dim=-1), ValueError, "max_head_dim=-1", "at least 0"),
    "a multiple of 0": Case(limits(head_dim_multiple=0), ValueError, "head_dim_multiple=0", "at least 1"),
    "capability is a number": Case(limits(min_capability=8.0), TypeError, "min_capability=8.0", "(8, 0)"),
    "causality is a text": Case(limits(causal="yes"), TypeError, "causal='yes'", "True or False"),
    "name with a blank": Case(registered(name=" x"), TypeError, "' x'", "outer blanks"),
    "limits are a dict": Case(registered(limits={}), TypeError, "backend=", "limits", "Limits"),
    "requires is a text": Case(registered(requires="numpy"), TypeError, "backend=", "requires 'numpy'", "tuple"),
    "priority is a text": Case(registered(priority="high"), TypeError, "backend=", "priority 'high'", "integer"),
}
