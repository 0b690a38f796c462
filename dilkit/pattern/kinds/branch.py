"""`Branch`: the interface of a kind of branch of a pattern."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError, head_range, positive
from dilkit.pattern.heads import Heads

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.pattern.lowering.forms import Form


@dataclass(frozen=True)
class Branch(ABC):
    """One branch of a pattern: it says whether query i of a head sees key j, and a pattern counts how many branches say so.

    A kind is a frozen dataclass with these methods, of which `sees` has to be there; `dilkit.register_kind` makes it known. Its
    fields are its arguments, `heads` the last of them: the range (start, stop) of query heads that it serves, None for all.

        >>> import torch
        >>> from dilkit import Branch, SlidingWindow
        >>> window = SlidingWindow(2)
        >>> isinstance(window, Branch), window.kind, window.serves(3)
        (True, 'sliding_window', True)
        >>> rows = torch.arange(3)
        >>> window.sees(rows, rows, heads=None)[0].tolist()
        [[True, True, False], [True, True, True], [False, True, True]]
    """

    kind: ClassVar[str]
    argument: ClassVar[str] = ""
    """The argument of `dilkit.dilated_attention` that gives what the branch shows, where `is_given_by_call`."""

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int] | None:
        """The query heads that the branch serves."""

    @abstractmethod
    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        """Return a mask, bool `(heads served or 1, m, n)`: query `rows[i]` `(m,)` sees key `keys[j]` `(n,)`, causality aside."""

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        """Count the query-key pairs over all heads that the branch serves; by default one by one."""
        from dilkit.pattern.lowering.evaluated import counted

        return counted(self, seq, heads, is_causal)

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        """Return what the branch shows to these heads, as forms, two of which have no pair in common.

        They hold for sequences of any length, and `seq` is 2**63 - 1, unless `is_evaluated`. By default `sees` is evaluated for
        every pair of the first `seq` tokens, up to 32,768.
        """
        from dilkit.pattern.lowering.evaluated import evaluated

        return evaluated(self, heads, seq)

    @property
    def is_evaluated(self) -> bool:
        """True if `forms` hold for `seq` tokens and shorter sequences alone."""
        return type(self).forms is Branch.forms

    def zero_keys(self, rows: Tensor, seq: Tensor, heads: Heads) -> Tensor | int:
        """Count the zero keys that `tail="zeros"` adds for `rows` of `seq` tokens: `(heads served or 1, m)`, or 0."""
        return 0

    def check_heads(self, in_model: int) -> None:  # noqa: B027 - most kinds serve all
        """Raise `PatternError` unless the branch can serve a model with so many query heads."""

    @property
    def max_seq(self) -> int:
        """The longest sequence that the branch can be applied to."""
        return WHOLE_SEQUENCE

    @property
    def goes_by_distance(self) -> bool:
        """True if whether i sees j follows from i - j alone: then a query before the first key may see some."""
        return False

    @property
    def is_of_whole_sequences(self) -> bool:
        """True if the keys that a token sees depend on later tokens: no cache can serve a sequence that grows."""
        return False

    @property
    def is_given_by_call(self) -> bool:
        """True if the tensor `argument` of each call of `dilkit.dilated_attention` says what the branch shows."""
        return False

    def shown_by(self, given: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """Return `sees` by the tensor of a call `(heads served or 1, ...)`, where `is_given_by_call`."""
        raise NotImplementedError(f"{type(self).__name__} is given by no call")

    @property
    def forgets_every(self) -> int:
        """The period in tokens: a row sees nothing before the last multiple of it."""
        return WHOLE_SEQUENCE

    @property
    def unit(self) -> int:
        """Tokens that a cut of a sequence better leaves together, or 0: any cut is as good."""
        return 0

    @property
    def goes_by_cells(self) -> bool:
        """True if a sequence has to be the cells of a grid row by row, which no curve can reorder."""
        return False

    def check_seq(self, seq: int) -> None:
        """Raise `PatternError` unless the branch can be applied to `seq` tokens; by default to at most `max_seq`."""
        if seq > self.max_seq:
            way = "give it what later tokens see as well"
            raise PatternError(f"seq={seq}: {type(self).__name__} is for {self.max_seq} tokens at most; {way}")

    def check_tokens(self, seq: int) -> None:  # noqa: B027
        """Raise `PatternError` where the branch names a token that a whole sequence of `seq` tokens, not causal, lacks."""

    def of_tokens(self, seq: int) -> Branch | None:
        """Return the branch without the named tokens that a sequence of `seq` tokens lacks; None if no others are left."""
        return self

    @property
    def differs_by_head(self) -> bool:
        """True if the heads of a model do not all see the same keys."""
        return self.heads is not None

    def serves(self, head: int) -> bool:
        """True if query head `head` takes part in this branch."""
        return self.heads is None or self.heads[0] <= head < self.heads[1]

    def served(self, heads: Heads) -> range:
        """Return the query heads at hand that take part in the branch."""
        return range(*self.range_served(heads))

    def range_served(self, heads: Heads) -> tuple[int, int]:
        """Return `served` as start and stop."""
        return self.heads or (0, heads.count)

    def within(self, start: int, stop: int) -> Branch | None:
        """Return the branch for the query heads `start` to `stop - 1`, numbered from 0; None if it serves none of them."""
        if self.heads is None:
            return self
        first, last = max(self.heads[0], start), min(self.heads[1], stop)
        return self.of_heads((first - start, last - start)) if first < last else None

    def of_heads(self, heads: tuple[int, int] | None) -> Branch:
        """Return the branch for the query heads `start` to `stop - 1`, or for all."""
        changes: dict[str, Any] = dict(heads=heads)
        return dataclasses.replace(self, **changes)

    def to_fields(self) -> dict[str, Any]:
        """Return the kind and the arguments as values of JSON."""
        return dict(kind=self.kind, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def arguments(cls) -> dict[str, bool]:
        """Return the fields that `to_fields` writes beside the kind; True for those that are required."""
        return {field.name: field.default is MISSING for field in fields(cls)}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Branch:
        """Return the branch whose arguments `to_fields` wrote."""
        return cls(**{name: _tupled(value) for name, value in values.items()})

    def call(self) -> str:
        """Return the call that makes this branch, without arguments that have their default."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        positional = [repr(value) for field, value in values if field.default is MISSING]
        named = [f"{f.name}={value!r}" for f, value in values if f.default is not MISSING and value != f.default]
        return f"{type(self).__name__}({', '.join([*positional, *named])})"

    def heads_text(self) -> str:
        """Return the end of a description: the heads that the branch serves."""
        return "" if self.heads is None else f", heads {self.heads[0]}-{self.heads[1] - 1}"

    def _settle(self, **numbers: Any) -> None:
        """Make these fields integers from 1 to 2**63 - 1 and `heads` a pair. Raises TypeError or `PatternError` naming them."""
        self._set(**{name: positive(name, value) for name, value in numbers.items()}, heads=head_range("heads", self.heads))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
