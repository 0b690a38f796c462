"""Kinds of branches that are not dilkit's."""

import importlib
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.backends_here import on
from helpers.calls import tensors
from helpers.odd_kinds import Gap, Posts, Reach, Turns
from helpers.strategies import mixes_with_heads
from hypothesis import given, settings, strategies as st

import dilkit
from dilkit import DilatedCache, Pattern, PatternError, Problem, SlidingWindow, dilated_attention, dilated_attention_varlen
from dilkit.comm import exchange_plan, ring_dilated_attention, run_threads
from dilkit.oracle import oracle_attention
from dilkit.pattern.kinds.registry import KINDS
from dilkit.pattern.lowering import Band, Runs
from dilkit.pattern.lowering.evaluated import MOST_TOKENS, counted, evaluated
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case
from dilkit.tools.cli import main
from dilkit.tools.commands.doctor import installed

ENTRIES = """[dilkit.kinds]
colours = helpers.odd_kinds:Colours
echo = helpers.odd_kinds:Echo
page = page_package:Page
absent_kind = no_such_module:Kind
leaving_kind = leaving_package:Leaving
misnamed_kind = helpers.odd_kinds:Echo
"""
PAGE = """
from dataclasses import dataclass
from typing import ClassVar
import dilkit

@dilkit.register_kind  # as docs/adding-a-kind.md has it beside an entry point
@dataclass(frozen=True)
class Page(dilkit.Branch):
    kind: ClassVar[str] = "page"
    heads: tuple[int, int] | None = None

    def sees(self, rows, keys, heads):
        return (rows[:, None] == keys)[None]
"""


@pytest.fixture(scope="module", autouse=True)
def _package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "page_package.py").write_text(PAGE)
    (folder / "leaving_package.py").write_text("import sys\nsys.exit('leaving')\n")
    facts = folder / "own_kinds_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-kinds-package\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRIES)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    for kind in ("colours", "echo", "page"):
        KINDS.pop(kind, None)
        sys.modules.pop("page_package", None)


def own(text):
    return Pattern.from_json(f'{{"branches":[{text}]}}')


COLOURS, ECHO = '{"kind":"colours","cell":3}', '{"kind":"echo","distance":5}'
WINDOW = '{"kind":"sliding_window","window":4}'


@pytest.mark.parametrize("first", ["the entry point", "the module"])
def test_an_entry_point_may_be_registered_as_well(first):
    KINDS.pop("page", None)
    sys.modules.pop("page_package", None)
    if first == "the module":
        importlib.import_module("page_package")
    assert str(own('{"kind":"page"}')) == "Pattern.of(Page())"


def test_broken_kinds_are_listed_and_stop_no_other(capsys):
    broken = {
        "absent_kind": "no_such_module:Kind is broken: ModuleNotFoundError",
        "leaving_kind": "leaving_package:Leaving is broken: SystemExit: leaving",
        "misnamed_kind": "whose kind is 'echo'",
    }
    for pattern in ("mistral(8)", "Page(), SlidingWindow(2)"):
        assert main(["draw", "--seq", "6", "--heads", "1", "--pattern", pattern]) == 0
    capsys.readouterr()
    assert main(["draw", "--seq", "6", "--heads", "1", "--pattern", "Leaving()"]) == 2
    assert broken["leaving_kind"] in capsys.readouterr().err
    told = {found.name: found.found for found in installed() if found.state == "WRONG"}
    for kind, text in broken.items():
        assert text in told[f"kind {kind}"]
        with pytest.raises(PatternError, match="uninstall its package"):
            own(f'{{"kind":"{kind}"}}')


def cases():
    yield COLOURS, dict(dtype="float64")
    yield COLOURS, dict(is_causal=True, mask="random", heads=6, kv_heads=2)
    yield ECHO, dict(dtype="bfloat16", is_causal=True)
    yield f"{COLOURS},{ECHO},{WINDOW}", dict(mask="random", sink="one")
    yield f"{WINDOW},{COLOURS}", dict(once=True, is_causal=True)
    yield f"{WINDOW},{COLOURS},{ECHO}", dict(once=True)  # blocks leave out a band that begins at a distance: native has none


@pytest.mark.parametrize("backend", on("cpu"))
def test_backends_compute_them_or_refuse(backend):
    verdicts = []
    for number, (text, options) in enumerate(cases()):
        pattern = own(text)
        pattern = pattern.with_branches(*pattern.branches, overlap="once" if options.pop("once", False) else "count")
        result = check(backend, Case(feature="own kinds", variant=str(number), pattern=pattern, seq=50, **options))
        assert result.verdict in ("passed", "refused"), (options, result.reasons)
        verdicts.append(result.verdict)
    assert verdicts.count("refused") <= {"reference": 0, "native": 1}.get(backend, len(verdicts))


ODD = {
    "one side": Reach(9, 2),
    "offsets by query head": Turns(8, 3),
    "those who see are not those who are seen": Posts((2, 4), (5, 6)),
    "without queries": Gap("window", (3, 9), (0, 0)),
    "without other keys than queries": Gap("window", (0, 3), (0, 5)),
    "without the first tokens": Gap("window", (0, 3), (0, 3)),
    "segments without": Gap("segments", (3, 5), (8, 12)),
    "global tokens without": Gap("tokens", (7, 10), (3, 4)),
}


@pytest.mark.parametrize("branch", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("is_causal", [False, True])
def test_forms_that_kinds_of_dilkit_do_not_have(branch, is_causal):
    sizes = dict(seq=30, kv_heads=2, batch=1, head_dim=8, dtype="float64", is_causal=is_causal)
    for backend in on("cpu"):
        result = check(backend, Case(feature="odd kinds", variant=backend, pattern=Pattern.of(branch), **sizes))
        assert result.verdict == "passed" or (result.verdict, backend) == ("refused", "sdpa"), (backend, result.reasons)


@pytest.mark.parametrize("name", ["evaluated", *ODD])
def test_decoding(name):
    pattern = Pattern.of(ODD[name]) if name in ODD else own(f"{COLOURS},{ECHO}")
    q, k, v = tensors(batch=1, seq=30, kv_heads=2)
    cache = DilatedCache(pattern, kv_heads=k.shape[2])
    rows = [cache.attend(*(x[:, i : i + 1] for x in (q, k, v))) for i in range(30)]
    torch.testing.assert_close(torch.cat(rows, 1), dilated_attention(q, k, v, pattern, is_causal=True), rtol=1e-5, atol=1e-5)


def test_packed_sequences_of_more_and_more_tokens():
    pattern = own(f"{COLOURS},{ECHO}")
    for lengths in ((9, 4), (40, 11), (13, 100)):
        q, k, v = torch.randn(3, sum(lengths), 2, 8).unbind()
        starts = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        out = dilated_attention_varlen(q, k, v, pattern, starts, backend="native")
        for rows in (slice(0, lengths[0]), slice(lengths[0], None)):
            expected = oracle_attention(*(x[None, rows].double() for x in (q, k, v)), pattern)[0]
            torch.testing.assert_close(out[None, rows].double(), expected, rtol=0, atol=1e-5)


@dilkit.register_kind
@dataclass(frozen=True)
class Near(dilkit.Branch):
    kind: ClassVar[str] = "near"

    back: int
    heads: tuple[int, int] | None = None

    def sees(self, rows, keys, heads):
        return ((rows[:, None] >= keys) & (rows[:, None] - keys <= self.back))[None]

    def forms(self, heads, seq):
        return [Band(heads=self.range_served(heads), back=min(self.back, seq - 1), ahead=0)]


def test_a_form_does_not_stay_cut_to_the_first_sequence():
    for seq in (4, 30):
        q, k, v = tensors(batch=1, seq=seq)
        out = dilated_attention(q, k, v, Pattern.of(Near(20)), backend="native")
        torch.testing.assert_close(out, oracle_attention(q, k, v, Pattern.of(Near(20)))[0].to(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["head by head", "halo", *ODD])
def test_over_ranks(name):
    known = {"head by head": own(f"{COLOURS},{WINDOW}"), "halo": Pattern.of(Reach(3, 3))}
    pattern, (q, k, v) = known[name] if name in known else Pattern.of(ODD[name]), tensors(batch=1, seq=30, kv_heads=2)
    window = Pattern.of(SlidingWindow(4))
    plans = [exchange_plan(each, (0, 10, 20, 30), 4, kv_heads=k.shape[2]) for each in (pattern, window)]
    rows = [plan.all_bytes("forward", head_dim=8, dtype="float32").tolist() for plan in plans]
    assert (rows[0] == rows[1]) == (name == "halo")
    whole = dilated_attention(q, k, v, pattern)

    def on_rank(comm):
        rows = slice(10 * comm.rank, 10 * comm.rank + 10)
        return ring_dilated_attention(q[:, rows], k[:, rows], v[:, rows], pattern, comm)

    torch.testing.assert_close(torch.cat(run_threads(3, on_rank), 1), whole, rtol=1e-5, atol=1e-5)


def test_beyond_the_length_that_is_evaluated_there_is_a_way_out():
    problem = Problem(pattern=own(COLOURS), seq=MOST_TOKENS + 1, heads=2, head_dim=8)
    decisions = {decision.name: decision for decision in dilkit.explain(problem).decisions}
    assert "sees is evaluated for at most 32,768 tokens; define Colours.forms" in " ".join(decisions["native"].reasons)
    assert decisions["reference"].verdict == "picked"


@settings(max_examples=40, deadline=None)
@given(mixes_with_heads(), st.integers(0, 26))
def test_what_is_evaluated_is_what_is_seen(drawn, seq):
    pattern, (heads, kv_heads) = drawn
    for branch in pattern.branches:
        alone = Pattern.of(branch, offset=pattern.offset, head_shard=pattern.head_shard)
        total = np.zeros((heads, seq, seq), np.int64)
        for form in evaluated(branch, pattern.among(heads, kv_heads), seq):
            assert isinstance(form, Runs)
            for table, turned in ((form.queries, False), (form.keys, True)):
                ends, first = np.cumsum([0, *table.runs]), 0
                for stop, low, high in zip(table.stop.tolist(), ends[:-1], ends[1:], strict=True):
                    for start, end in table.columns[low:high].tolist():
                        rows, columns = slice(first, stop), slice(start, end)
                        total[form.heads[0] : form.heads[1], columns if turned else rows, rows if turned else columns] += 1
                    first = stop
        count = alone.count(seq, heads, kv_heads=kv_heads).numpy()
        np.testing.assert_array_equal(total, 2 * count)
        for is_causal, pairs in ((False, count), (True, np.tril(count))):
            assert counted(branch, seq, alone.among(heads, kv_heads), is_causal) == pairs.sum()


@dataclass(frozen=True)
class NoName(dilkit.Branch):
    heads: tuple[int, int] | None = None

    def sees(self, rows, keys, heads):
        return (rows[:, None] == keys)[None]


NoDataclass = type("NoDataclass", (NoName,), {"kind": "no_dataclass"})
Taken, Unregistered = (
    dataclass(frozen=True)(type(kind.title(), (NoName,), {"kind": kind})) for kind in ("sliding_window", "new")
)


def test_what_is_no_kind_is_named():
    for given_class, complaint in (
        (Pattern, "a subclass of dilkit.Branch is needed"),
        (NoName, "kind=None: a name in lower case is needed"),
        (NoDataclass, "is no frozen dataclass"),
    ):
        with pytest.raises(TypeError, match=complaint):
            dilkit.register_kind(given_class)
    with pytest.raises(PatternError, match=r"'sliding_window' is that of dilkit.*SlidingWindow; give yours another name"):
        dilkit.register_kind(Taken)
    with pytest.raises(TypeError, match=r"branches\[1\].* is of a kind that is not known; dilkit.register_kind\(New\)"):
        Pattern.of(SlidingWindow(2), Unregistered())
