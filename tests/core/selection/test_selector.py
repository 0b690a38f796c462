"""The choice of a backend."""

import json
from itertools import product

import pytest
from helpers.fakes import Fake

from dilkit import Device, DilatedSegment, GlobalTokens, Limits, Pattern, Problem, SlidingWindow
from dilkit.registry import Broken
from dilkit.selector import trace

PATTERN = Pattern([16, 32], [1, 2])


def fakes(*backends):
    return {b.name: b for b in backends}


CUDA = frozenset({"cuda"})
BF16, HALF = frozenset({"bf16"}), frozenset({"float16", "bfloat16"})
FIRST_HEAD, IN_BLOCKS = Pattern([8], [2], heads=[(0, 1)]), Pattern([8], [2], offset="block")
ONCE, MIX = Pattern([8], [2], overlap="once"), Pattern.of(SlidingWindow(4), DilatedSegment(8, 2), GlobalTokens(4))
PASCAL = dict(min_capability=(6, 0), max_capability=(6, 1), dtypes=frozenset({"float32", "float16"}))
AMPERE = dict(min_capability=(8, 0), dtypes=HALF, head_dim_multiple=8, overlaps=frozenset({"count"}))
FAMILY = fakes(
    Fake("anything", -10),
    Fake("vector", 1, Limits()),
    Fake("avx512", 9, Limits(device_features=frozenset({"avx512"}))),
    Fake("pascal", 5, Limits(devices=CUDA, **PASCAL)),
    Fake("tensor", 7, Limits(devices=CUDA, device_features=frozenset({"fp16_tensor_cores"}), dtypes=HALF, max_head_dim=128)),
    Fake("ampere", 8, Limits(devices=CUDA, **AMPERE)),
    Fake("wgmma", 9, Limits(devices=CUDA, device_features=frozenset({"wgmma"}), dtypes=HALF, key_padding_mask=False)),
)


def problem(device="cpu", **options):
    options = {"pattern": PATTERN, "seq": 64, "heads": 4, "head_dim": 64, "dtype": "float16", **options}
    return Problem(device=Device.assume(device), **options)


@pytest.mark.parametrize(
    ("limits", "asked", "reason"),
    [
        (Limits(), problem("sm_80"), "device cuda: runs on cpu"),
        (Limits(devices=CUDA), problem(), "device cpu: runs on cuda"),
        (Limits(devices=CUDA, min_capability=(8, 0)), problem("sm_75"), "capability 7.5: at least 8.0 is needed"),
        (Limits(devices=CUDA, max_capability=(6, 2)), problem("sm_70"), "capability 7.0: at most 6.2 is supported"),
        (Limits(devices=None, device_features=BF16), problem("sm_52"), "device features fp16_storage: bf16 needed"),
        (Limits(dtypes=frozenset({"float32"})), problem(), "dtype float16: computes float32"),
        (Limits(max_head_dim=32), problem(), "head_dim 64: at most 32"),
        (Limits(head_dim_multiple=8), problem(head_dim=60), "head_dim 60: a multiple of 8 is needed"),
        (Limits(causal=False), problem(is_causal=True), "is_causal yes: not supported"),
        (Limits(key_padding_mask=False), problem(key_padding_mask=True), "key_padding_mask yes: not supported"),
        (Limits(gradients=False), problem(requires_grad=True), "requires_grad yes: not supported"),
        (Limits(grouped_heads=False), problem(kv_heads=2), "grouped heads yes: not supported"),
        (Limits(head_ranges=False), problem(pattern=FIRST_HEAD), "head ranges yes: not supported"),
        (Limits(offsets=frozenset({"modulo"})), problem(pattern=IN_BLOCKS), "offset 'block': supports modulo"),
        (Limits(overlaps=frozenset({"count"})), problem(pattern=ONCE), "overlap 'once': supports count"),
        (Limits(), problem(pattern=MIX), "branch kind global_tokens, sliding_window: supports dilated_segment"),
        (Limits(forms=frozenset({"band"})), problem(), "branch kind dilated_segment: shown as segments; computes band"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_limit_has_its_reason(limits, asked, reason):
    decision = trace(asked, fakes(Fake("fake", 0, limits))).decisions[0]
    assert (decision.verdict, decision.reasons) == ("refused", (reason,))


def test_all_reasons_are_given():
    limits = Limits(dtypes=frozenset({"float32"}), max_head_dim=32, causal=False, overlaps=frozenset({"once"}))
    (decision,) = trace(problem(is_causal=True), fakes(Fake("fake", 0, limits))).decisions
    assert [reason.split()[0] for reason in decision.reasons] == ["dtype", "head_dim", "is_causal", "overlap"]


def test_a_missing_module_is_a_reason_and_nothing_is_imported():
    class Needy(Fake):
        requires = ("dilkit_no_such_module", "torch")

    (decision,) = trace(problem(), fakes(Needy("needy", 0))).decisions
    assert decision.reasons == ("module dilkit_no_such_module: not installed (pip install dilkit_no_such_module)",)


class Gone(BaseException):
    """A BaseException that is no Exception."""


NONSENSE = [ZeroDivisionError("x"), SystemExit(1), NotImplementedError(), Gone("far away"), None, 3]


@pytest.mark.parametrize(("method", "nonsense"), [*product(["refusals"], NONSENSE), *product(["detail"], NONSENSE[:4])], ids=repr)
def test_a_backend_whose_judgement_is_nonsense_is_broken_and_the_next_is_taken(method, nonsense):
    def judge(self, problem):
        if isinstance(nonsense, BaseException):
            raise nonsense
        return nonsense

    bad = type("Bad", (Fake,), {method: judge})("bad", 9)
    decided = trace(problem(), fakes(bad, Fake("good", 0)))
    assert decided.picked == "good"
    assert [(d.name, d.verdict) for d in decided.decisions] == [("good", "picked"), ("bad", "broken")]
    error = type(nonsense) if isinstance(nonsense, BaseException) else TypeError
    assert error.__name__ in decided.decisions[1].reasons[0]


def test_ties_go_by_name_and_the_order_of_candidates_does_not_matter():
    forwards = fakes(Fake("b", 1), Fake("a", 1), Fake("c", 1), Broken("d", "somewhere", "why"))
    backwards = dict(reversed(forwards.items()))
    assert trace(problem(), forwards) == trace(problem(), backwards)
    assert [d.name for d in trace(problem(), forwards).decisions] == ["a", "b", "c", "d"]


def test_those_asked_for_are_tried_in_their_order_and_no_other_is_taken():
    decided = trace(problem("sm_90", key_padding_mask=True), FAMILY, ("wgmma", "tensor", "ampere"))
    assert decided.picked == "tensor"
    verdicts = {d.name: d.verdict for d in decided.decisions}
    assert verdicts["ampere"] == "able"
    assert {d.name: d.reasons for d in decided.decisions}["anything"] == ("not asked for",)
    assert trace(problem("sm_90", key_padding_mask=True), FAMILY, ("wgmma", "pascal")).picked is None


def test_a_trace_is_text_and_plain_data():
    decided = trace(problem("sm_61"), FAMILY | fakes(Broken("bad", "plug:In", "OSError: gone")), ("pascal",))
    text = str(decided)
    assert "on assumed (GTX 1080, sm_61); asked for: pascal" in text
    assert "pascal    picked" in text
    assert "bad       broken   plug:In: OSError: gone" in text
    data = decided.to_dict()
    assert data == json.loads(json.dumps(data))
    assert (data["picked"], data["requested"], len(data["backends"])) == ("pascal", ["pascal"], 8)
    assert "no backend is installed" in str(trace(problem(), {}))
