"""`Problem`: the facts of one call, by which the selector chooses a backend and the backend computes. Hashable, no tensors."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.bias.form import BiasForm
from dilkit.checks import LONGEST, boolean, check_type, integer, one_of, probability, real
from dilkit.device import Device, probe
from dilkit.pattern import Pattern, PatternError
from dilkit.pattern.lowering import Forms, lower

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float64", "float32", "bfloat16", "float16")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
STORED = {"float64": (), "float32": ("bfloat16", "int8"), "bfloat16": ("int8",), "float16": ("int8",)}
"""The dtypes beside its own in which a step of decoding may have the rows that a query attends to."""

MOST_SCALE = (1e30, 1e300)
"""The largest |scale| of dtypes that accumulate in fp32, and of fp64: there is room for `|q . k|` up to 1e8."""

MOST_DROPPED = (2**32, 2**40, 2**16)
"""The most sequences, tokens and heads that the generator of dropout tells apart."""

_FROM_THE_REST: Any = None
"""Default of a field that is worked out from the other fields."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of dilated attention, without its tensors.

    Raises ValueError or TypeError, naming the argument, for a size, dtype, device or pattern that does not fit.

    Example:

        >>> from dilkit import Pattern, Problem
        >>> problem = Problem(pattern=Pattern([512, 2048], [1, 4]), seq=4096, heads=8, kv_heads=2, head_dim=64, is_causal=True)
        >>> print(problem)
        1 x 4,096 tokens, 8 heads over 2 key/value heads x 64, float32, is_causal, Pattern([512, 2048], [1, 4])
        >>> problem.scale
        0.125
    """

    pattern: Pattern
    seq: int
    """Tokens of a sequence: keys, and queries unless `queries` says otherwise."""
    heads: int
    """Query heads."""
    head_dim: int
    """Numbers in one row of a head."""
    batch: int = 1
    """Sequences."""
    kv_heads: int = _FROM_THE_REST
    """Key/value heads, a divisor of `heads`; by default `heads`."""
    dtype: str = "float32"
    """One of "float64", "float32", "bfloat16" or "float16"."""
    device: Device = field(default_factory=lambda: probe("cpu"))
    """The device that the tensors are on; by default the CPU of this machine."""
    is_causal: bool = False
    """True if a query sees no key after itself."""
    key_padding_mask: bool = False
    """True if the call has a mask of keys."""
    requires_grad: bool = False
    """True if a backward pass will follow."""
    varlen: bool = False
    """True if sequences are packed one after the other; `seq` is then at least the longest, `batch` is 1."""
    kv_cache: bool = False
    """True if only the last rows are computed, against a cache of keys and values whose capacity is `seq`."""
    stored: str = ""
    """Dtype of the stored rows that a step of decoding attends to (`DecodingBackend.attend_stored`); empty: it is no step."""
    dropout_p: float = 0.0
    """The probability with which a weight is dropped."""
    softcap: float = 0.0
    """Scores are `softcap * tanh(score / softcap)` before the bias; 0 for none."""
    bias: BiasForm | None = None
    """The kind of bias that is added to the scores."""
    queries: int | None = None
    """Queries of a sequence, of packed ones of the longest, where query i is not key i; None where it is."""
    query_offset: int | None = 0
    """The position of the first query among the keys; None where each call says it."""
    scale: float = _FROM_THE_REST
    """The factor of the scores; by default `head_dim ** -0.5`."""
    encoded: ClassVar[Any] = None
    """Tables that the backend made for a prepared call (`Backend.encode`); None where it has to make them itself."""

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name, least in (("batch", 0), ("seq", 0), ("heads", 1), ("head_dim", 1), ("kv_heads", 1)):
            object.__setattr__(self, name, integer(name, getattr(self, name), at_least=least))
        for name in ("is_causal", "key_padding_mask", "requires_grad", "varlen", "kv_cache"):
            boolean(name, getattr(self, name))
        one_of("dtype", self.dtype, DTYPES)
        one_of("stored", self.stored, ("", self.dtype, *STORED[self.dtype]))
        check_type("pattern", self.pattern, Pattern, "a dilkit.Pattern is needed")
        check_type("device", self.device, Device, "a dilkit.Device is needed, such as Device.assume('sm_80')")
        scale = float(self.head_dim) ** -0.5 if self.scale is None else real("scale", self.scale)
        object.__setattr__(self, "scale", check_scale(scale, self.dtype))
        self.pattern.check_heads(self.heads, self.kv_heads)
        object.__setattr__(self, "dropout_p", probability("dropout_p", self.dropout_p))
        softcap = real("softcap", self.softcap)
        if softcap < 0:
            raise ValueError(f"softcap={softcap:g} must be at least 0, for none")
        object.__setattr__(self, "softcap", softcap)
        check_type("bias", self.bias, (BiasForm, type(None)), "a dilkit.bias.form.BiasForm is needed")
        if self.queries is not None:
            object.__setattr__(self, "queries", integer("queries", self.queries, at_least=0))
        if self.query_offset is not None:
            object.__setattr__(self, "query_offset", integer("query_offset", self.query_offset))
        if self.queries is None and self.query_offset != 0:
            raise ValueError(f"query_offset={self.query_offset} goes with queries=, their number; both are needed")
        self._check_sizes()
        if not (self.varlen or self.kv_cache or self.stored):  # of these, only the lengths of the sequences say
            end = 0 if self.queries is None or self.query_offset is None else self.query_offset + self.queries
            self.pattern.check_seq(max(self.seq, end))

    def _check_sizes(self) -> None:
        sizes = self.batch, self.seq, self.heads, self.head_dim
        if DTYPE_BYTES[self.dtype] * math.prod(size or 1 for size in sizes) > LONGEST:
            named = "batch={}, seq={}, heads={}, head_dim={}".format(*sizes)
            raise ValueError(f"{named} of {self.dtype} are more than the {LONGEST} bytes that a tensor can have")
        numbered = self.batch, self.span, self.first_head + self.heads
        if self.dropout_p and any(size > most for size, most in zip(numbered, MOST_DROPPED, strict=True)):
            most = "batch, seq and heads can be at most {:,}, {:,} and {:,}".format(*MOST_DROPPED)
            raise ValueError(f"{self}: {most} with dropout_p={self.dropout_p:g}; use dropout_p=0, or split the tensors")

    @property
    def span(self) -> int:
        """The positions that queries and keys lie in: `seq` where query i is key i."""
        if self.queries is None:
            return self.seq
        if self.query_offset is None:
            return self.seq + self.queries
        return max(self.seq, self.query_offset + self.queries) - min(self.query_offset, 0)

    def with_encoded(self, encoded: Any) -> Problem:
        """Return an equal problem that holds what its backend encoded of it."""
        held = copy.copy(self)
        held.__dict__["encoded"] = encoded
        return held

    @property
    def forms(self) -> Forms:
        """The pattern of these heads, as forms that kernels compute."""
        return lower(self.pattern, self.span, self.heads, self.kv_heads)

    @property
    def first_head(self) -> int:
        """The number in the whole model of the first query head of the tensors."""
        shard = self.pattern.head_shard
        return 0 if shard is None else shard[0] * (self.heads // self.kv_heads)

    @classmethod
    def of(cls, query: Tensor, key: Tensor, pattern: Pattern, **options: Any) -> Problem:
        """Return the problem of a call with these tensors. `options` are further fields, such as `is_causal`.

        >>> import torch
        >>> from dilkit import Pattern, Problem
        >>> query, key = torch.empty(2, 1024, 8, 64), torch.empty(2, 1024, 4, 64)
        >>> problem = Problem.of(query, key, Pattern([512], [1]))
        >>> problem.batch, problem.seq, problem.heads, problem.kv_heads, problem.head_dim
        (2, 1024, 8, 4, 64)
        """
        batch, seq, heads, head_dim = query.shape
        device = probe(query.device.type, query.device.index or 0)
        dtype = str(query.dtype).removeprefix("torch.")
        sizes: dict[str, Any] = dict(batch=batch, seq=seq, heads=heads, head_dim=head_dim, kv_heads=key.shape[2])
        return cls(pattern=pattern, dtype=dtype, device=device, **(sizes | options))

    def flops(self) -> int:
        """Nominal forward FLOPs (see `Pattern.flops`), of packed or cached sequences those of one of the longest.

        Of `queries` beside other keys, their share of the FLOPs of as many queries as keys.
        """
        # Backends ask at every call. No cached_property: before Python 3.12 that has a lock, bad for forks.
        flops: int | None = self.__dict__.get("_flops")
        if flops is None:
            flops = 0  # of a grid, where all sequences are empty or of other lengths, which are refused when they are read
            sizes = dict(batch=self.batch, kv_heads=self.kv_heads)
            seq = min(self.seq, self.pattern.max_seq)  # of packed sequences the power of two that none is longer than
            with suppress(PatternError):
                flops = self.pattern.flops(seq, self.heads, self.head_dim, is_causal=self.is_causal, **sizes)
            if self.queries is not None:
                flops = flops * self.queries // max(seq, 1)
            self.__dict__["_flops"] = flops
        return flops

    def __str__(self) -> str:
        heads = f"{self.heads} heads" + (f" over {self.kv_heads} key/value heads" if self.kv_heads != self.heads else "")
        flags = ("is_causal", "key_padding_mask", "requires_grad", "varlen", "kv_cache")
        options = "".join(f", {name}" for name in flags if getattr(self, name))
        options += f", dropout_p={self.dropout_p:g}" if self.dropout_p else ""
        options += f", softcap={self.softcap:g}" if self.softcap else ""
        options += f", bias: {self.bias}" if self.bias else ""
        options += f", rows stored in {self.stored}" if self.stored else ""
        tokens = f"{self.seq:,} tokens" if self.queries is None else f"{self.queries:,} queries of {self.seq:,} keys"
        return f"{self.batch} x {tokens}, {heads} x {self.head_dim}, {self.dtype}{options}, {self.pattern}"


def default_offset(queries: int, keys: int, is_causal: bool) -> int:
    """Return the position of the first of so many queries among so many keys, where a call names none."""
    return keys - queries if is_causal else 0


def check_scale(scale: float, dtype: str) -> float:
    """Return `scale`. Raises ValueError if scores in `dtype` would be infinite."""
    if abs(scale) > (most := MOST_SCALE[dtype == "float64"]):
        raise ValueError(f"scale={scale:g} would make infinite scores in {dtype}; at most {most:g} is needed")
    return scale
