"""Random steps of decoding over a pool of stored rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilkit import Pattern, Problem
from dilkit.bias.evaluated import evaluate
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.decoding.layout import decoded, encoded, width_of
from dilkit.decoding.protocol import PlacedStep, Span, Step, Write, place, table
from dilkit.op.boundary import lse_dtype
from dilkit.problem import STORED

TOKENS = 10_000


@dataclass(frozen=True)
class StepCase:
    """Sizes and dtypes of a step; `bias`, of `BIASES`."""

    dtype: str = "float32"
    stored: str = ""
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 20
    batch: int = 2
    seq: int = 2
    most: int = 150
    spans: int = 5
    bias: str = ""
    softcap: float = 0.0
    sink: bool = False
    seed: int = 0

    @property
    def problem(self) -> Problem:
        form, sizes = FORMS[self.bias], dict(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        scores = dict(stored=self.stored or self.dtype, softcap=self.softcap, bias=form)
        return Problem(pattern=Pattern.dense(), seq=1, batch=self.batch, dtype=self.dtype, is_causal=True, **sizes, **scores)


FORMS = {
    "": None,
    "alibi": BiasForm(),
    "table": BiasForm(sizes=(31,)),
    "coordinates": BiasForm(2, metric="euclidean", placed=True),
    "grid": BiasForm(2, (3, 5), placed=True),
    "apart": BiasForm(3, metric="max", placed=True, apart=True),
}

GPU_DTYPES = [(dtype, stored) for dtype in ("float32", "bfloat16", "float16") for stored in ("", *STORED[dtype])]
GPU_SHAPES = {"grouped": (6, 3, 20), "as many": (3, 3, 64), "many": (10, 1, 33), "small": (2, 2, 3)}
GPU_BIASES = [name for name in FORMS if name != "apart"]
GPU_LIMITS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Limits of kernels for GPUs: dtypes of rows and of stored ones, heads, key/value heads and head_dim, and by how much."""

LARGE = 2**62
ASTRAY = [(name, number) for name in Span._fields for number in (LARGE, 2**40, 99_999, -1, -LARGE)]
ASTRAY += [("positions", 0), ("unseen", 0)]  # shorter ones, of other spans
FEW_ASTRAY = [
    ("positions", 0),
    ("unseen", 0),
    ("seen", LARGE),
    ("key_offset", LARGE),
    ("value_head", -1),
    ("unseen", 2**40),
    ("pages", 99_999),
    ("page", LARGE),
    ("key", 2**40),  # of a write, where its key goes
]


def gpu_case(dtypes: tuple[str, str], shape: str, bias: str) -> StepCase:
    """A row of the product of what kernels for GPUs are held to."""
    (dtype, stored), (heads, kv_heads, head_dim) = dtypes, GPU_SHAPES[shape]
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return StepCase(dtype, stored, **sizes, bias=bias, softcap=1.5 * (head_dim == 20), sink=head_dim == 64, most=600)


def agree(computed: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], limit: float):
    for name, a, b in zip(("out", "lse"), computed, right, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a.double(), b.double(), atol=limit, rtol=limit, msg=lambda text, name=name: f"{name}: {text}")


def check_that_nothing_is_seen(attend: Callable[[Step, Problem], tuple[Tensor, Tensor]]):
    case, sink = StepCase(), torch.arange(6.0)
    step = make_step(case)
    nothing = step._replace(spans=step.spans[:0], writes=step.writes[:0])
    out, lse = attend(nothing, case.problem)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out, lse = attend(nothing._replace(sink=sink), case.problem)
    assert not out.any()
    torch.testing.assert_close(lse, sink[:, None].expand(2, 6, 2), atol=1e-6, rtol=1e-6)


def led_astray(step: Step, problem: Problem, name: str, number: int) -> PlacedStep:
    """Write `number` into a column of every span and of every write, after the tables were checked."""
    placed = place(step, problem)
    placed.spans[:, Span._fields.index(name)] = number
    placed.writes[:, min(Span._fields.index(name), placed.writes.shape[1] - 1)] = number
    return placed


def make_step(case: StepCase) -> Step:
    """All stored rows that no span shows, and those that a span leaves out, are NaN."""
    draw = torch.Generator().manual_seed(case.seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    dtype, kept = getattr(torch, case.dtype), getattr(torch, case.stored or case.dtype)
    width, rows = width_of(case.head_dim, kept), case.batch * case.seq
    stored, spans, writes, positions, unseen = [], list[Span](), list[Write](), list[Tensor](), list[Tensor]()
    for at in range(case.spans):
        row = number(0, rows - 1)
        count, of_rows, head = number(1, case.most), number(1, rows - row), number(0, case.kv_heads - 1)
        step = number(1, 2)
        heads = number(1, (case.kv_heads - 1 - head) // step + 1)
        every = number(1, 3)
        pool = encoded(torch.full((2, of_rows, heads, count * every, case.head_dim), torch.nan), kept)
        shown = torch.randn(2, of_rows, heads, count, case.head_dim, generator=draw)
        if at % 2:
            mask = torch.rand(heads, case.heads // case.kv_heads, count, generator=draw) < 0.3
            shown[:, :, mask.all(1).nonzero()[:, 0], mask.all(1).nonzero()[:, 1]] = torch.nan
            unseen.append(mask)
        pool[:, :, :, ::every] = encoded(shown.to(dtype), kept)
        tail = pool.new_zeros(1, 1)  # the first row begins after an element of something else
        stored.append(torch.cat((tail.flatten(), pool.flatten())))
        strides = heads * count * every * width, count * every * width, every * width
        place, query, first = at, number(0, TOKENS - 1), number(0, TOKENS - 3 * count - 1)
        given = -1
        if at % 3 == 0:
            positions.append(torch.randint(0, TOKENS, (count,), generator=draw))
            given = len(positions) - 1
        served = row, of_rows, head, step, heads
        values = place, 1 + pool[0].numel(), *strides
        spans.append(Span(*served, count, place, 1, *strides, *values, query, first, 3, given, len(unseen) - 1 if at % 2 else -1))
        if at % 2 == 0:  # of the last row that a span shows
            last = (count - 1) * every * width
            writes.append(Write(*served, place, 1 + last, *strides[:2], place, values[1] + last, *strides[:2]))
    query = torch.randn(case.batch, case.seq, case.heads, case.head_dim, generator=draw).to(dtype)
    key, value = torch.randn(2, case.batch, case.seq, case.kv_heads, case.head_dim, generator=draw).to(dtype)
    sink = torch.randn(case.heads, generator=draw).to(lse_dtype(dtype)) if case.sink else None
    lines = table(spans, len(Span._fields)), table(writes, len(Write._fields))
    return Step(query, tuple(stored), *lines, key, value, sink, _bias(case, draw), tuple(positions), tuple(unseen))


PAGED, PAGE_ROWS, FIRST, APART = 3, 7, 5, 2
"""The span that `in_pages` changes; the rows of a page, the first that is seen, and how far it is to the next."""


def in_pages(step: Step, problem: Problem) -> Step:
    """Put the rows of a span into scattered pages, where hidden ones are NaN."""
    span = Span(*step.spans[PAGED].tolist())
    old, width = step.stored[span.key], width_of(problem.head_dim, step.stored[span.key].dtype)
    places = FIRST + APART * torch.arange(span.seen)
    order = torch.randperm(int(places[-1]) // PAGE_ROWS + 4, generator=torch.Generator().manual_seed(0))
    empty = encoded(torch.full((problem.head_dim,), torch.nan), old.dtype)
    pool = empty.expand(2, len(order), span.rows, span.heads, PAGE_ROWS, width).contiguous()
    for part, (_, offset, *strides) in zip(pool, (span[6:11], span[11:16]), strict=True):
        rows = old.as_strided((span.rows, span.heads, span.seen, width), (*strides, 1), offset)
        part[order[places // PAGE_ROWS], :, :, places % PAGE_ROWS] = rows.permute(2, 0, 1, 3)
    strides = span.heads * PAGE_ROWS * width, PAGE_ROWS * width, width
    paged = dict(pages=1, page_rows=PAGE_ROWS, page=span.rows * strides[0], page_first=FIRST, page_step=APART)
    values = dict(value=PAGED, value_offset=pool[0].numel(), value_sequence=strides[0], value_head=strides[1], value_row=width)
    keys = dict(key=PAGED, key_offset=0, key_sequence=strides[0], key_head=strides[1], key_row=width)
    columns = span._replace(**keys, **values, **paged)
    spans, pages = step.spans.copy(), np.array([9, *order.tolist()])  # the first page is of another span
    spans[PAGED] = columns
    stored = (*step.stored[:PAGED], pool.flatten(), *step.stored[PAGED + 1 :])
    return step._replace(stored=stored, spans=spans, pages=pages)


def _bias(case: StepCase, draw: torch.Generator) -> LoweredBias | None:
    form, dtype = FORMS[case.bias], lse_dtype(getattr(torch, case.dtype))
    if form is None:
        return None
    weights = torch.rand(case.heads, form.entries, generator=draw).to(dtype) / 100
    places = torch.randint(-4, 5, (case.batch, TOKENS, form.columns), generator=draw).to(dtype)
    return LoweredBias(form, weights, places if form.placed else None)


def expected(step: Step, problem: Problem) -> tuple[Tensor, Tensor]:
    """`(out, lse)` in double precision, row by row, after the writes; stored tensors are not changed."""
    query = step.query.double().flatten(0, 1)
    (rows, heads, dim), group = query.shape, problem.heads // problem.kv_heads
    stored = [x.clone() for x in step.stored]
    assert step.key is not None
    assert step.value is not None
    for write in (Write(*line) for line in step.writes.tolist()):
        for new, at, offset, sequence, head in ((step.key, *write[5:9]), (step.value, *write[9:13])):
            for r in range(write.rows):
                for h in range(write.heads):
                    row = encoded(new.flatten(0, 1)[write.row + r, write.first_head + h * write.head_step], stored[at].dtype)
                    first = offset + r * sequence + h * head
                    stored[at][first : first + len(row)] = row
    out, lse = torch.zeros(rows, heads, dim).double(), torch.full((rows, heads), -torch.inf).double()
    for r in range(rows):
        for h in range(heads):
            scores, values = _seen(step, problem, stored, query[r, h], r, h, h // group)
            if step.sink is not None:
                scores, values = (
                    torch.cat((scores, step.sink[h : h + 1].double())),
                    torch.cat((values, torch.zeros(1, dim).double())),
                )
            if len(scores):
                out[r, h], lse[r, h] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out.view(step.query.shape), lse.view(*step.query.shape[:2], heads).transpose(1, 2)


def _seen(
    step: Step, problem: Problem, stored: list[Tensor], query: Tensor, row: int, head: int, kv_head: int
) -> tuple[Tensor, Tensor]:
    """Scores and values of all stored rows that a query head sees."""
    all_scores, all_values = [torch.zeros(0).double()], [torch.zeros(0, problem.head_dim).double()]
    for span in (Span(*line) for line in step.spans.tolist()):
        place, rest = divmod(kv_head - span.first_head, span.head_step)
        if rest or not 0 <= place < span.heads or not span.row <= row < span.row + span.rows:
            continue
        keys, values = (
            _rows(stored[at], span.seen, offset + (row - span.row) * sequence + place * of_head, apart, problem)
            for at, offset, sequence, of_head, apart in (span[6:11], span[11:16])
        )
        scores = problem.scale * (keys @ query)
        if problem.softcap:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        at = torch.arange(span.seen) * span.position_step + span.position
        at = step.positions[span.positions] if span.positions >= 0 else at
        if step.bias is not None:
            own = step.bias._replace(weights=step.bias.weights.double())
            if own.positions is not None:
                own = own._replace(positions=own.positions[row // step.query.shape[1]][None].double())
            scores = scores + evaluate(own, torch.tensor([span.query_position]), at)[0, head, 0]
        seen = torch.ones(span.seen, dtype=torch.bool)
        if span.unseen >= 0:
            seen = ~step.unseen[span.unseen][place, head % (problem.heads // problem.kv_heads)]
        all_scores.append(scores[seen])
        all_values.append(values[seen])
    return torch.cat(all_scores), torch.cat(all_values)


def _rows(stored: Tensor, count: int, first: int, apart: int, problem: Problem) -> Tensor:
    width = width_of(problem.head_dim, stored.dtype)
    return decoded(stored.as_strided((count, width), (apart, 1), first), torch.float64)
