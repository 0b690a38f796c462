"""One table of calls that mean nothing: what is called, which error it raises, and what the message must hold.

Every message names the argument and the limit. `test_malformed.py` runs the table.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import dilkit
from dilkit import Device, DilatedAttention, MultiheadDilatedAttention, Pattern, PatternError, Problem
from dilkit.backends.reference import Reference
from dilkit.oracle import oracle_attention
from dilkit.tools.cli import main

P = Pattern([4, 8], [1, 2])
Q = torch.zeros(2, 6, 4, 8)
MASK = torch.zeros(2, 6, dtype=torch.bool)
INNER = DilatedAttention(P)
LAYER = MultiheadDilatedAttention(32, 4, INNER)
ROWS = torch.zeros(2, 6, 32)


class Case(NamedTuple):
    """`call()` must raise `error` with every one of `fragments` in its text."""

    call: Callable[[], Any]
    error: type[Exception]
    fragments: tuple[str, ...]
    environment: Mapping[str, str] = {}


class CommandError(Exception):
    """What a command wrote to stderr before it ended with exit code 2."""


def attend(query: Any = Q, key: Any = Q, value: Any = Q, pattern: Any = P, **options: Any) -> Callable[[], Any]:
    return lambda: dilkit.dilated_attention(query, key, value, pattern, **options)


def pattern(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: Pattern(*args, **options)


def problem(**options: Any) -> Callable[[], Any]:
    return lambda: Problem(**{"pattern": P, "seq": 6, "heads": 4, "head_dim": 8, **options})


def layer(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: MultiheadDilatedAttention(*args, **options)


def command(*argv: str) -> Callable[[], None]:
    def run() -> None:
        with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
            code = main(argv)
        if code == 2:
            raise CommandError(stderr.getvalue())

    return run


def autocast_with_integers() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dilkit.dilated_attention(Q, Q.long(), Q.long(), P)


def enter(*names: Any) -> Callable[[], Any]:
    return lambda: dilkit.use_backend(*names).__enter__()


CALLS = {
    "query is an array": Case(attend(np.zeros((2, 6, 4, 8))), TypeError, ("query", "ndarray", "torch.Tensor")),
    "key is None": Case(attend(key=None), TypeError, ("key", "NoneType", "torch.Tensor")),
    "query of 3 dimensions": Case(attend(Q[0]), ValueError, ("query", "(6, 4, 8)", "(batch, seq, heads, head_dim)")),
    "value of 5 dimensions": Case(attend(value=Q[None]), ValueError, ("value", "(1, 2, 6, 4, 8)", "head_dim)")),
    "integer tensors": Case(attend(*[Q.long()] * 3), TypeError, ("query", "int64", "float32", "bfloat16")),
    "complex tensors": Case(attend(*[Q.cfloat()] * 3), TypeError, ("query", "complex64", "float64")),
    "integer key under autocast": Case(autocast_with_integers, TypeError, ("key", "int64", "float32")),
    "mixed dtypes": Case(attend(key=Q.half()), ValueError, ("key", "float16", "float32", "key.to(query)")),
    "mixed devices": Case(attend(value=Q.to("meta")), ValueError, ("value", "meta", "cpu", "value.to(query)")),
    "sparse query": Case(attend(Q.to_sparse()), TypeError, ("query", "sparse_coo", "strided", "to_dense")),
    "strided last dimension": Case(attend(key=Q.mT.contiguous().mT), ValueError, ("key", "stride 4", "contiguous")),
    "key and value differ": Case(attend(key=Q[:, :, :2]), ValueError, ("key", "value", "(2, 6, 2, 8)", "equal")),
    "batches differ": Case(attend(Q[:1]), ValueError, ("key", "batch 2", "query 1")),
    "lengths differ": Case(attend(Q[:, :5]), ValueError, ("key", "seq 6", "query 5")),
    "head_dims differ": Case(attend(Q[..., :7].contiguous()), ValueError, ("key", "head_dim 8", "query 7")),
    "kv heads do not divide": Case(
        attend(key=Q[:, :, :3], value=Q[:, :, :3]), ValueError, ("key", "3 heads", "4 heads of query")
    ),
    "no heads": Case(attend(*[Q[:, :, :0]] * 3), ValueError, ("query", "at least one head")),
    "no kv heads": Case(attend(key=Q[:, :, :0], value=Q[:, :, :0]), ValueError, ("key", "0 heads", "divide")),
    "no head_dim": Case(attend(*[Q[..., :0]] * 3), ValueError, ("query", "head_dim 1")),
    "pattern is a tuple": Case(attend(pattern=([4], [1])), TypeError, ("pattern", "tuple", "dilkit.Pattern")),
    "heads of the pattern": Case(
        attend(pattern=Pattern([4], [1], heads=[(2, 5)])), PatternError, ("heads[0]", "(2, 5)", "4 heads")
    ),
    "mask of floats": Case(attend(key_padding_mask=MASK.float()), TypeError, ("key_padding_mask", "float32", "torch.bool")),
    "mask is a list": Case(attend(key_padding_mask=[True]), TypeError, ("key_padding_mask", "list", "bool torch.Tensor")),
    "mask of other length": Case(attend(key_padding_mask=MASK[:, :5]), ValueError, ("key_padding_mask", "(2, 5)", "(2, 6)")),
    "mask of heads": Case(attend(key_padding_mask=MASK[:, None]), ValueError, ("key_padding_mask", "(2, 1, 6)", "(2, 6)")),
    "mask elsewhere": Case(attend(key_padding_mask=MASK.to("meta")), ValueError, ("key_padding_mask", "meta", "cpu", ".to(")),
    "is_causal is a text": Case(attend(is_causal="yes"), TypeError, ("is_causal='yes'", "str", "True or False")),
    "is_causal is a tensor": Case(attend(is_causal=torch.tensor(True)), TypeError, ("is_causal", "Tensor", "True or False")),
    "return_lse is a number": Case(attend(return_lse=1), TypeError, ("return_lse=1", "int", "True or False")),
    "scale is a text": Case(attend(scale="0.5"), TypeError, ("scale='0.5'", "str", "number")),
    "scale is a tensor": Case(attend(scale=torch.tensor(0.5)), TypeError, ("scale", "Tensor", "number")),
    "scale is a bool": Case(attend(scale=True), TypeError, ("scale=True", "bool", "number")),
    "scale is NaN": Case(attend(scale=float("nan")), ValueError, ("scale=nan", "finite")),
    "scale is an endless integer": Case(attend(scale=10**400), ValueError, ("scale", "too large", "finite")),
    "scale leaves fp32": Case(attend(scale=-1e38), ValueError, ("scale=-1e+38", "float32", "1e+30")),
    "nested tensors": Case(
        attend(*3 * [torch.nested.as_nested_tensor([ROWS[0], ROWS[1]], layout=torch.jagged)]), TypeError, ("query", "nested")
    ),
    "scale is infinite": Case(attend(scale=-float("inf")), ValueError, ("scale=-inf", "finite")),
    "backend is a number": Case(attend(backend=1), TypeError, ("backend=1", "int", "name")),
    "backend is an object": Case(attend(backend=dilkit.Backend), TypeError, ("backend=", "ABCMeta", "name")),
    "backend is no one": Case(attend(backend=[]), ValueError, ("backend=[]", "name")),
    "backend of numbers": Case(attend(backend=["reference", 2]), ValueError, ("backend=['reference', 2]", "name")),
    "two backends in one text": Case(attend(backend="sdpa,reference"), ValueError, ("backend='sdpa,reference'", "list of names")),
    "backend with a semicolon": Case(attend(backend="sdpa;x"), ValueError, ("backend='sdpa;x'", "list of names")),
    "unknown backend": Case(attend(backend="fast"), ValueError, ("backend='fast'", "known: ", "reference")),
    "unknown backend, nothing to do": Case(attend(*[Q[:0]] * 3, backend="fast"), ValueError, ("backend='fast'", "known: ")),
    "oracle beyond its size": Case(
        lambda: oracle_attention(*[torch.zeros(1, 2**16, 1, 1)] * 3, P), PatternError, ("seq=65536", "entries", "at most")
    ),
}

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
    "flops of a negative": Case(lambda: P.flops(-1, 2, 8), ValueError, ("seq=-1", "at least 0")),
}

FACTS = {
    "batch below zero": Case(problem(batch=-1), ValueError, ("batch=-1", "at least 0")),
    "no heads": Case(problem(heads=0), ValueError, ("heads=0", "at least 1")),
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
}

MODULES = {
    "pattern of a module": Case(lambda: DilatedAttention([4]), TypeError, ("pattern=[4]", "dilkit.Pattern")),
    "scale of a module": Case(lambda: DilatedAttention(P, scale="x"), TypeError, ("scale='x'", "number")),
    "embed_dim and heads": Case(layer(30, 4, INNER), ValueError, ("embed_dim=30", "num_heads=4")),
    "no heads": Case(layer(32, 0, INNER), ValueError, ("num_heads=0", "at least 1")),
    "kv heads of a module": Case(layer(32, 4, INNER, num_kv_heads=3), ValueError, ("num_kv_heads=3", "num_heads=4")),
    "dropout": Case(layer(32, 4, INNER, dropout=0.1), ValueError, ("dropout=0.1", "only")),
    "batch_first": Case(layer(32, 4, INNER, batch_first=False), ValueError, ("batch_first=False", "only")),
    "neither attention nor lists": Case(layer(32, 4), (ValueError, TypeError), ("attention", "segment_lengths")),
    "need_weights": Case(lambda: LAYER(ROWS, ROWS, ROWS, need_weights=True), ValueError, ("need_weights=True", "only")),
    "attn_mask": Case(lambda: LAYER(ROWS, ROWS, ROWS, attn_mask=MASK), ValueError, ("attn_mask", "pattern")),
    "width of the rows": Case(lambda: LAYER(ROWS[..., :31], ROWS, ROWS), ValueError, ("query", "(2, 6, 31)", "32")),
    "mask of a module": Case(
        lambda: LAYER(ROWS, ROWS, ROWS, key_padding_mask=MASK.float() - 1), ValueError, ("key_padding_mask", "0 and -inf", "bool")
    ),
}

ENVIRONMENT = {
    "no names": Case(attend(), ValueError, ("DILKIT_BACKEND=','", "empty name"), {"DILKIT_BACKEND": ","}),
    "an empty name": Case(attend(), ValueError, ("DILKIT_BACKEND='sdpa,'", "empty name"), {"DILKIT_BACKEND": "sdpa,"}),
    "an unknown name": Case(attend(), ValueError, ("DILKIT_BACKEND='NaN'", "known: "), {"DILKIT_BACKEND": "NaN"}),
    "bytes in letters": Case(
        dilkit.environment.cache_bytes, ValueError, ("DILKIT_CACHE_BYTES='abc'", "bytes"), {"DILKIT_CACHE_BYTES": "abc"}
    ),
    "bytes below zero": Case(
        dilkit.environment.cache_bytes, ValueError, ("DILKIT_CACHE_BYTES='-1'", "0 or more"), {"DILKIT_CACHE_BYTES": "-1"}
    ),
    "bytes that are NaN": Case(
        dilkit.environment.cache_bytes, ValueError, ("DILKIT_CACHE_BYTES='nan'", "whole number"), {"DILKIT_CACHE_BYTES": "nan"}
    ),
    "explain with an unknown name": Case(
        lambda: dilkit.explain(problem()()), ValueError, ("DILKIT_BACKEND='no'", "known: "), {"DILKIT_BACKEND": "no"}
    ),
}

COMMANDS = {
    "no such command": Case(command("infos"), CommandError, ("infos", "info", "verify")),
    "no such option": Case(command("info", "--colour"), CommandError, ("--colour",)),
    "no such GPU": Case(command("info", "--assume", "gtx"), CommandError, ("--assume", "'gtx'", "sm_61")),
    "no such device": Case(command("info", "--device", "tpu"), CommandError, ("--device", "'tpu'", "cuda")),
    "seq of zero": Case(command("info", "--seq", "0"), CommandError, ("--seq", "'0'", "1 or more")),
    "heads of letters": Case(command("info", "--heads", "x"), CommandError, ("--heads", "'x'", "whole number")),
    "kv heads": Case(command("info", "--heads", "4", "--kv-heads", "3"), CommandError, ("--kv-heads", "3", "4")),
    "dtype": Case(command("info", "--dtype", "int8"), CommandError, ("--dtype", "'int8'", "fp16")),
    "segments": Case(command("info", "--segments", "4,,8"), CommandError, ("--segments", "''", "whole number")),
    "rates": Case(command("info", "--segments", "4,8", "--rates", "1"), CommandError, ("--segments", "--rates", "one rate")),
    "rate above segment": Case(
        command("info", "--segments", "4", "--rates", "8"), CommandError, ("--rates", "=8", "=4", "at most")
    ),
    "offset": Case(command("draw", "--offset", "x"), CommandError, ("--offset", "'x'", "modulo")),
    "backend": Case(command("verify", "--backend", "no"), CommandError, ("--backend", "no", "reference")),
}

TABLE = {
    f"{part}: {name}": case
    for part, cases in dict(
        call=CALLS, pattern=PATTERNS, facts=FACTS, module=MODULES, environment=ENVIRONMENT, command=COMMANDS
    ).items()
    for name, case in cases.items()
}
