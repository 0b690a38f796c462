"""Malformed patterns, problems and devices, and choices of backends that cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers.malformed.case import MASK, Case, P

import dilkit
from dilkit import Device, DilatedSegment, Pattern, PatternError, Problem
from dilkit.backends.reference import Reference


def pattern(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: Pattern(*args, **options)


def problem(**options: Any) -> Callable[[], Any]:
    return lambda: Problem(**{"pattern": P, "seq": 6, "heads": 4, "head_dim": 8, **options})


def enter(*names: Any) -> Callable[[], Any]:
    return lambda: dilkit.use_backend(*names).__enter__()


PATTERNS = {
    "no branches": Case(pattern([], []), PatternError, ("segment_lengths", "empty", "at least one")),
    "unequal lists": Case(pattern([4, 8], [1]), PatternError, ("segment_lengths", "2", "dilation_rates", "1")),
    "lengths are a number": Case(pattern(4, [1]), TypeError, ("segment_lengths=4", "sequence of integers")),
    "rates are a text": Case(pattern([4], "1"), TypeError, ("dilation_rates='1'", "sequence of integers")),
    "a fraction": Case(pattern([4.0], [1]), TypeError, ("segment_lengths[0]=4.0", "float", "integer")),
    "a bool": Case(pattern([4], [True]), TypeError, ("dilation_rates[0]=True", "bool", "integer")),
    "a zero": Case(pattern([0], [1]), PatternError, ("segment_lengths[0]=0", "from 1")),
    "a negative rate": Case(pattern([4, 4], [1, -2]), PatternError, ("dilation_rates[1]=-2", "from 1")),
    "beyond 64 bits": Case(pattern([2**63], [1]), PatternError, ("segment_lengths[0]", "2**63 - 1")),
    "rate above segment": Case(pattern([4], [5]), PatternError, ("dilation_rates[0]=5", "segment_lengths[0]=4", "at most")),
    "unknown offset": Case(pattern([4], [1], offset="random"), PatternError, ("offset='random'", "'modulo'", "'block'")),
    "offset is no text": Case(pattern([4], [1], offset=["modulo"]), PatternError, ("offset=['modulo']", "'block'")),
    "unknown overlap": Case(pattern([4], [1], overlap="twice"), PatternError, ("overlap='twice'", "'count'", "'once'")),
    "heads for one of two": Case(pattern([4, 8], [1, 2], heads=[None]), PatternError, ("heads has 1", "2 branches")),
    "heads are a number": Case(pattern([4], [1], heads=2), TypeError, ("heads=2", "range")),
    "heads are one range": Case(pattern([4], [1], heads=range(2)), TypeError, ("heads=range(0, 2)", "each branch")),
    "a range with a step": Case(pattern([4], [1], heads=[range(0, 4, 2)]), PatternError, ("heads[0]", "step 2", "step 1")),
    "a range of nothing": Case(pattern([4], [1], heads=[(2, 2)]), PatternError, ("heads[0]=(2, 2)", "start < stop")),
    "a negative head": Case(pattern([4], [1], heads=[(-1, 2)]), PatternError, ("heads[0]=(-1, 2)", "0 <= start")),
    "a triple of heads": Case(pattern([4], [1], heads=[(0, 1, 2)]), TypeError, ("heads[0]=(0, 1, 2)", "(start, stop)")),
    "heads of floats": Case(pattern([4], [1], heads=[(0.0, 1.0)]), TypeError, ("heads[0]=0.0", "integer")),
    "more branches than heads": Case(lambda: Pattern.head_split([4, 8], [1, 2], 1), PatternError, ("num_heads=1", "2 branches")),
    "num_heads is a text": Case(lambda: Pattern.head_split([4], [1], "2"), TypeError, ("num_heads='2'", "integer")),
    "count of a fraction": Case(lambda: P.count(4.5, 2), TypeError, ("seq=4.5", "integer")),
    "count of no heads": Case(lambda: P.count(4, 0), ValueError, ("heads=0", "at least 1")),
    "count of odd groups": Case(lambda: P.count(4, 4, kv_heads=3), PatternError, ("kv_heads=3", "divide heads=4")),
    "count of too much": Case(lambda: P.count(2**20, 8), PatternError, ("seq=1048576", "heads=8", "at most")),
    "count of nothing, in heads without end": Case(lambda: P.count(0, 10**12), PatternError, ("heads=1000000000000", "at most")),
    "flops of heads without end": Case(lambda: P.flops(8, 10**12, 8), PatternError, ("heads=1000000000000", "at most")),
    "flops of a negative": Case(lambda: P.flops(-1, 2, 8), ValueError, ("seq=-1", "at least 0")),
    "nested lengths": Case(pattern([[4]], [1]), TypeError, ("segment_lengths[0]=[4]", "integer")),
    "no lengths": Case(pattern(None, None), TypeError, ("segment_lengths=None", "sequence")),
    "floats of numpy": Case(pattern(np.array([4.0]), [1]), TypeError, ("segment_lengths[0]", "4.0", "integer")),
    "heads are a dict": Case(pattern([4], [1], heads={0: 1}), TypeError, ("heads={0: 1}", "sequence")),
    "a shard of other heads": Case(pattern([4], [1], head_shard=(5, 4)), PatternError, ("head_shard=(5, 4)", "first < total")),
    "a shard of heads as a text": Case(pattern([4], [1], head_shard="0/4"), TypeError, ("head_shard='0/4'", "pair")),
    "causality of a count": Case(lambda: P.count(6, 4, is_causal="x"), TypeError, ("is_causal='x'", "True or False")),
    "causality of flops": Case(lambda: P.flops(6, 4, 8, is_causal=1), TypeError, ("is_causal=1", "True or False")),
    "flops of a text": Case(lambda: P.flops(6, 4, "8"), TypeError, ("head_dim='8'", "integer")),
    "no heads to split": Case(lambda: Pattern.head_split([4], [1], 0), PatternError, ("num_heads=0", "at least one")),
    "JSON is a dict": Case(lambda: Pattern.from_json({}), TypeError, ("text={}", "dict", "to_json")),
    "JSON is no JSON": Case(lambda: Pattern.from_json("{"), PatternError, ("text='{'", "not JSON")),
    "JSON of a list": Case(lambda: Pattern.from_json("[]"), PatternError, ("text='[]'", "object")),
    "JSON without rates": Case(lambda: Pattern.from_json('{"segment_lengths": [4]}'), PatternError, ("dilation_rates",)),
    "JSON of another thing": Case(lambda: Pattern.from_json('{"width": 3}'), PatternError, ("'width'", "segment_lengths")),
    "JSON without an end": Case(lambda: Pattern.from_json("[" * 100_000), PatternError, ("not JSON", "recursion")),
    "JSON of endless digits": Case(lambda: Pattern.from_json("9" * 5000), PatternError, ("not JSON", "...")),
    "a segment of nothing": Case(lambda: DilatedSegment(0, 1), PatternError, ("segment_length=0", "1 to 2**63 - 1")),
    "a segment below its rate": Case(lambda: DilatedSegment(4, 8), PatternError, ("dilation_rate=8", "segment_length=4")),
    "a segment of a text": Case(lambda: DilatedSegment("4", 1), TypeError, ("segment_length='4'", "integer")),
    "a segment of one head": Case(lambda: DilatedSegment(4, 1, heads=3), TypeError, ("heads=3", "pair")),
}

FACTS = {
    "batch below zero": Case(problem(batch=-1), ValueError, ("batch=-1", "at least 0")),
    "no heads": Case(problem(heads=0), ValueError, ("heads=0", "at least 1")),
    "heads without end": Case(problem(heads=2**63), ValueError, ("heads=9223372036854775808", "at most 1048576")),
    "tensors beyond 64 bits": Case(problem(seq=2**59), ValueError, ("seq=576460752303423488", "9223372036854775807 bytes")),
    "seq is a text": Case(problem(seq="6"), TypeError, ("seq='6'", "str", "integer")),
    "kv_heads do not divide": Case(problem(kv_heads=3), PatternError, ("kv_heads=3", "divide heads=4")),
    "unknown dtype": Case(problem(dtype="int8"), ValueError, ("dtype='int8'", "'float32'")),
    "dtype of torch": Case(problem(dtype=torch.float32), ValueError, ("dtype=torch.float32", "'float32'")),
    "pattern is JSON": Case(problem(pattern=P.to_json()), TypeError, ("pattern=", "str", "dilkit.Pattern")),
    "device is a text": Case(problem(device="cuda"), TypeError, ("device='cuda'", "str", "Device.assume")),
    "flag is a number": Case(problem(requires_grad=1), TypeError, ("requires_grad=1", "True or False")),
    "mask is a tensor": Case(problem(key_padding_mask=MASK), TypeError, ("key_padding_mask=", "True or False")),
    "scale is NaN": Case(problem(scale=float("nan")), ValueError, ("scale=nan", "finite")),
    "no capability": Case(lambda: Device.assume("gtx1080"), ValueError, ("'gtx1080'", "sm_61")),
    "too old a GPU": Case(lambda: Device.assume("sm_30"), ValueError, ("3.0", "5.2", "oldest")),
    "capability is a number": Case(lambda: Device.assume(6.1), TypeError, ("6.1", "float", "sm_61")),
    "explain of a pattern": Case(lambda: dilkit.explain(P), TypeError, ("problem=", "Pattern", "dilkit.Problem")),
    "use_backend of nothing": Case(enter(), ValueError, ("use_backend", "known: ")),
    "use_backend of a list": Case(enter(["reference"]), TypeError, ("use_backend=['reference']", "str")),
    "use_backend of no one": Case(enter("reference", "no"), ValueError, ("use_backend='no'", "known: ")),
    "dtype of the reference": Case(lambda: Reference("int8"), ValueError, ("compute_dtype='int8'", "'float64'")),
    "register a class": Case(lambda: dilkit.register_backend(dilkit.Backend), TypeError, ("backend=", "instance")),
    "unregister no one": Case(lambda: dilkit.unregister_backend("no"), ValueError, ("name='no'", "registered")),
    "seq is a tensor": Case(problem(seq=torch.tensor(6.0)), TypeError, ("seq=tensor(6.)", "integer")),
    "head_dim of zero": Case(problem(head_dim=0), ValueError, ("head_dim=0", "at least 1")),
    "no kv_heads": Case(problem(kv_heads=0), ValueError, ("kv_heads=0", "at least 1")),
    "device of torch": Case(problem(device=torch.device("cpu")), TypeError, ("device=", "dilkit.Device")),
    "heads beyond the problem": Case(problem(pattern=Pattern([4], [1], heads=[(2, 9)])), PatternError, ("(2, 9)", "4 heads")),
    "no name of a device": Case(lambda: Device.assume(""), ValueError, ("''", "sm_61")),
    "device without a number": Case(lambda: Device.assume("cuda"), ValueError, ("'cuda'", "sm_61")),
    "type of a device": Case(lambda: Device(3, "x"), TypeError, ("type=3", "int", "text")),
    "capability of a device": Case(lambda: Device("cuda", "x", "sm_80"), TypeError, ("capability='sm_80'", "(8, 0)")),
    "features of a device": Case(lambda: Device("cpu", "x", features=["avx2"]), TypeError, ("features=['avx2']", "frozenset")),
    "explain nothing": Case(lambda: dilkit.explain(None), TypeError, ("problem=None", "dilkit.Problem")),
    "explain for a number": Case(lambda: dilkit.explain(problem()(), 3), TypeError, ("backend=3", "int", "name")),
    "explain for numbers": Case(lambda: dilkit.explain(problem()(), [1]), ValueError, ("backend=[1]", "name")),
    "explain for no one": Case(lambda: dilkit.explain(problem()(), []), ValueError, ("backend=[]", "name")),
    "explain for a typo": Case(lambda: dilkit.explain(problem()(), "sdpaa"), ValueError, ("backend='sdpaa'", "known: ")),
    "use_backend of None": Case(enter(None), TypeError, ("use_backend=None", "str")),
}
