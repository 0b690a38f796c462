"""Attention of a layer whose rows are a part of a sequence: its call of `dilkit.comm`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers.patterns import DENSE
from dilkit.integrations.transformers.sequences import ONE_SEQUENCE, TokenMask, check_first, is_cut
from dilkit.pattern import Pattern

KEPT_AS = "dilkit_ranks"
BY_POSITIONS = "dilkit_by_positions"
"""The argument of a model's call by which its layers know that positions restart or not at 0: `WholeBatch.by_positions`."""
BY_ROWS = ("position_ids", "cu_seq_lens_q")
STEP = "rows of a model under context_parallel"
UNKNOWN = -1
WAY_OUT = "give the model what ContextParallel.shard(batch) returns, on every rank"


@dataclass(frozen=True)
class LayerRanks:
    """The ranks, a `dilkit.comm.Comm`, that a layer's sequence is cut over, with `schedule` and `keep` of the exchange.

    `calls`: looked up once, as torch.compile cannot. `checks_rows`: it is the first layer of its model.
    """

    calls: Any
    comm: Any
    schedule: str | None
    keep: str
    checks_rows: bool

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern,
        mask: TokenMask | None,
        options: dict[str, Any],
        **call: Any,
    ) -> Tensor:
        """Attend from this rank's rows over all ranks; `call`: arguments of `ring_dilated_attention`.

        Raises ValueError, on all ranks, for rows that do not follow those of the rank before, and what dilkit.comm raises.
        """
        cu_seqlens = options.get("cu_seq_lens_q")
        call |= dict(schedule=self.schedule or ("balanced" if pattern == DENSE else "auto"), keep=self.keep)
        if torch.compiler.is_compiling():
            _check_own_rows(query, key, mask, options)
            if BY_POSITIONS in options and cu_seqlens is not None:
                raise ValueError(
                    "position_ids that begin anew are not looked at by torch.compile; give cu_seq_lens_q and cu_seq_lens_k"
                )
        elif self.checks_rows:
            self._check_rows(query, key, mask, options)
        if cu_seqlens is None:
            out: Tensor = self.calls.attend(query, key, value, pattern, self.comm, **call)
            return out
        if call.pop("dropout_p"):
            raise ValueError("dropout of packed sequences over ranks is not computed; give attention_dropout=0, or no padding")
        q, k, v = (x.squeeze(0) for x in (query, key, value))
        packed: Tensor = self.calls.attend_packed(q, k, v, pattern, self.comm, cu_seqlens.int(), **call)
        return packed.unsqueeze(0)

    def _check_rows(self, query: Tensor, key: Tensor, mask: TokenMask | None, options: dict[str, Any]) -> None:
        may_differ = ("rows", "first", "last", "cut")
        ranks = self.calls.agree_on(self.comm, lambda: _facts(query, key, mask, options), STEP, may_differ)
        starts = list(accumulate((facts["rows"] for facts in ranks), initial=0))
        for rank, (facts, start) in enumerate(zip(ranks, starts, strict=False)):
            expected = ranks[0]["first"] + start
            if facts["first"] >= 0 and (facts["first"], facts["last"]) != (expected, expected + facts["rows"] - 1):
                raise ValueError(
                    f"rank {rank}{self.comm.along} has positions {facts['first']} to {facts['last']}, but its {facts['rows']} "
                    f"rows follow {start} of the ranks before: {WAY_OUT}. A model that does not hand cu_seq_lens_q to its layers "
                    "computes neither padding nor packed sequences over ranks"
                )
        if ranks[0]["total"] not in (UNKNOWN, starts[-1]):
            raise ValueError(f"cu_seq_lens_q ends at {ranks[0]['total']}, but the ranks have {starts[-1]} rows: {WAY_OUT}")
        if BY_POSITIONS not in options:
            return
        if ranks[0]["first"] > 0:
            check_first(mask, ranks[0]["first"])
        if (cu_seqlens := options.get("cu_seq_lens_q")) is not None:
            cuts = []
            for facts, start in zip(ranks, starts, strict=False):
                if any(start < begin < start + facts["rows"] for begin in cu_seqlens.tolist()):  # where its mask shows a cut
                    cuts.append(facts["cut"])
            if not cuts or not all(cuts):
                raise ValueError(ONE_SEQUENCE)


def _check_own_rows(query: Tensor, key: Tensor, mask: TokenMask | None, options: dict[str, Any]) -> None:
    if mask is not None and mask.tokens is not None:
        raise ValueError(
            f"attention_mask has padding, or may have under torch.compile; it is left out before a sequence is cut: {WAY_OUT}"
        )
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"{query.shape[1]} rows and {key.shape[1]} keys, as with a cache: over ranks a model is trained, or run on whole "
            "sequences; generate with a model that context_parallel was not called on"
        )
    if options.get("position_bias") is not None and all(options.get(name) is None for name in BY_ROWS):
        raise ValueError(
            f"a layer with a position bias gets neither {' nor '.join(BY_ROWS)}, by which the places of its rows are known: "
            f"{WAY_OUT}. A model that does not hand them to its layers, such as LongT5, is not computed over ranks"
        )


def _facts(query: Tensor, key: Tensor, mask: TokenMask | None, options: dict[str, Any]) -> dict[str, Any]:
    _check_own_rows(query, key, mask, options)
    rows, cu_seqlens, positions = query.shape[1], options.get("cu_seq_lens_q"), options.get("position_ids")
    facts = dict(rows=rows, total=UNKNOWN, first=UNKNOWN, last=UNKNOWN, cut=BY_POSITIONS in options and is_cut(mask))
    if cu_seqlens is not None:
        return facts | dict(total=int(cu_seqlens[-1]))
    if positions is not None and positions.ndim == 2 and positions.shape[1] == rows:
        facts["first"], facts["last"] = positions[0, [0, -1]].tolist()
    return facts
