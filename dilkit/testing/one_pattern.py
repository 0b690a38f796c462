"""The cases that check one pattern: every feature of a call, in every dtype."""

from __future__ import annotations

from dilkit.pattern import Pattern, PatternError
from dilkit.problem import DTYPES
from dilkit.testing.problems import Case, Fields

_FIELDS: dict[str, Fields] = {
    "plain": {},
    "causal": dict(is_causal=True),
    "mask": dict(mask="random"),
    "mask causal": dict(mask="left", is_causal=True),
    "grouped heads": dict(kv_heads=1),
    "sink": dict(sink="random"),
    "dropout": dict(dropout_p=0.2),
    "bias": dict(bias="alibi"),
    "softcap": dict(softcap=1.0),
    "sliced": dict(layout="sliced"),
}


def cases_of(pattern: Pattern, seq: int = 48, heads: int = 4) -> tuple[Case, ...]:
    """The cases of `pattern` in sequences of `seq` tokens: each feature of a call alone, sequences packed and last rows, in
    every dtype. Raises PatternError where `pattern` takes no sequence of `seq` tokens.

    >>> len(cases_of(Pattern([8, 16], [1, 2])))
    48
    """
    pattern.check_seq(seq)
    lengths = (seq, *(shorter for shorter in (seq // 3, 1, 0) if _takes(pattern, shorter)), seq)
    packed: Fields = dict(lengths=lengths, seq=sum(lengths), batch=1)
    last_rows: Fields = dict(lengths=(seq, seq), seq=seq, rows=min(seq, 3), is_causal=True, gradients=False)
    whole = {name: dict(seq=seq, **fields) for name, fields in _FIELDS.items()}
    features = whole | {"packed": packed, "last rows": last_rows}
    return tuple(
        Case(feature=feature, variant="pattern", pattern=pattern, heads=heads, dtype=dtype, **fields)
        for feature, fields in features.items()
        for dtype in DTYPES
    )


def _takes(pattern: Pattern, seq: int) -> bool:
    try:
        pattern.check_seq(seq)
    except PatternError:
        return False
    return True
