"""`lower`: the forms of a pattern."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dilkit import environment, plan
from dilkit.pattern.checks import WHOLE_SEQUENCE
from dilkit.pattern.lowering.checks import forms_of
from dilkit.pattern.lowering.forms import Form
from dilkit.pattern.lowering.once import counted_once

if TYPE_CHECKING:
    from dilkit.pattern.pattern import Pattern


class Forms(tuple[Form, ...]):
    """The forms of a pattern, as the pattern cache keeps them."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the forms."""
        return frozenset(form.name for form in self)

    @property
    def nbytes(self) -> int:
        """About the bytes of all arrays."""
        return sum(form.nbytes for form in self)


def lower(pattern: Pattern, seq: int, heads: int, kv_heads: int | None = None) -> Forms:
    """Lower `pattern` for `heads` query heads over `kv_heads` key/value heads to forms (`dilkit.pattern.lowering.forms`).

        count[h, i, j] = number of forms that serve h and show (i, j), less what they leave out

    With `overlap="count"` they are the forms of one branch after the other. With `overlap="once"` no two show the same pair: each
    leaves out what those before it show, by its own numbers where that is possible. They hold for sequences of `seq` tokens and
    shorter ones; of branches that say their forms by formula, for any.

        >>> from dilkit import Pattern, SlidingWindow, Strided
        >>> from dilkit.pattern.lowering import lower
        >>> window, stride = lower(Pattern.of(Strided(4), SlidingWindow(6), overlap="once"), seq=64, heads=2)
        >>> (window.back, window.rate, window.first), (stride.rate, stride.first)
        ((5, 1, 0), (4, 6))
    """
    kv_heads = kv_heads or heads
    key = "forms", pattern.to_json(), heads, kv_heads, seq if pattern.is_evaluated else WHOLE_SEQUENCE
    return plan.cached(key, partial(_lowered, pattern, seq, heads, kv_heads))


def _lowered(pattern: Pattern, seq: int, heads: int, kv_heads: int) -> Forms:
    at_hand = pattern.among(heads, kv_heads)
    forms = [replace(form, branch=i) for i, branch in enumerate(pattern.branches) for form in forms_of(branch, at_hand, seq)]
    lowered = Forms(counted_once(forms) if pattern.overlap == "once" else forms)
    if (nbytes := lowered.nbytes) > _SMALL and 0 < (limit := environment.cache_bytes()) < 2 * nbytes:
        warnings.warn(
            f"{pattern}: its tables take {nbytes:,} bytes, and those of a backend as many, but {environment.CACHE_BYTES.name} is "
            f"{limit:,}: they are made anew at each call; {environment.CACHE_BYTES.name}={4 * nbytes} keeps them",
            stacklevel=2,
        )
    return lowered


_SMALL = 2**20
"""Bytes of tables that take no time worth a word to make anew."""
