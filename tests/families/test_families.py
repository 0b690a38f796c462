"""Classes of models of transformers with dilated attention: what `eager` attention gives, or refused. And their own tests."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install dilkit[transformers])")
from families import own_tests
from families.own_tests import Reason, compared, differences, outcomes_of
from families.run import EQUAL, NO_ATTENTION, NOT_LOOKED_UP, REFUSED, WRONG, Examined, classes, examine, examine_all

FILE = Path(__file__).with_name("examined.json")
QUICK = {
    ("LlamaForCausalLM", "llama"): EQUAL,
    ("BigBirdPegasusForCausalLM", "bigbird_pegasus"): EQUAL,
    ("BertModel", "bert"): EQUAL,
    ("BloomForCausalLM", "bloom"): EQUAL,
    ("DeepseekV3ForCausalLM", "deepseek_v3"): EQUAL,
    ("MambaModel", "mamba"): NO_ATTENTION,
    ("XGLMForCausalLM", "xglm"): NOT_LOOKED_UP,
    ("DeepseekV32ForCausalLM", "deepseek_v32"): REFUSED,
}


@pytest.mark.parametrize("model", QUICK, ids=lambda model: model[0])
def test_some_classes(model):
    found = examine(*model)
    assert found.verdict == QUICK[model], found
    assert (found.every_layer_asks is True) == (found.verdict == EQUAL), found


def test_layers_that_ask_whether_the_attention_is_ours():
    """Layers of Switch get no mask that says so."""
    assert examine("SwitchTransformersModel", "switch_transformers").verdict == EQUAL


def test_every_class_was_tried_and_none_is_wrong():
    examined = [Examined(**one) for one in json.loads(FILE.read_text())["classes"]]
    assert len(examined) > 700
    assert not [one for one in examined if one.verdict == WRONG]
    assert not [one for one in examined if one.verdict == REFUSED and not one.reason]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_class_of_a_tenth_is_wrong():
    """All classes take ten minutes of CPU time: `python tests/families/run.py`."""
    assert not [one for one in examine_all(classes()[::10]) if one.verdict == WRONG]


STAND_IN = """
import pytest, torch, unittest
from transformers import LlamaConfig, LlamaForCausalLM

def logits(attention=None, **options):
    torch.manual_seed(0)
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention)).eval()
    return model, model(torch.arange(6)[None], **options).logits

def test_equal(): torch.testing.assert_close(logits()[1], logits("eager")[1])
def test_no_attention(): pass
def test_wrong(monkeypatch):
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or sdpa(*a, **k))
    logits()
    assert len(calls) == 1

class Tests(unittest.TestCase):
    def test_name(self): self.assertTrue(logits()[0].config._attn_implementation == "sdpa")
    def test_refused(self):
        with self.subTest("mask"): logits(attention_mask=torch.full((1, 1, 6, 6), 0.5))
    def test_not_counted(self): self.fail("always")
    @pytest.mark.skip("never")
    def test_not_counted_when_skipped(self): pass
"""


def test_tests_are_sorted_by_what_dilkit_changes(tmp_path):
    (tmp_path / "test_stand_in.py").write_text(STAND_IN)
    (tmp_path / "none.ini").touch()
    runs = []
    for attention in ("sdpa", "dilkit"):
        file = tmp_path / f"{attention}.jsonl"
        options = ("-q", "-c", tmp_path / "none.ini", "-p", "no:cacheprovider", "-p", "no:xdist", f"--attention={attention}")
        pytest.main([*map(str, options), f"--outcomes={file}", str(tmp_path)], plugins=[own_tests])
        runs.append(outcomes_of(file))
    for kind, outcome in compared(*runs):
        assert kind.replace(" ", "_") == outcome.test.rpartition("test_")[2].removesuffix("_when_skipped"), outcome
    reasons = [Reason("refused", "attention_mask of LlamaAttention", "masks of pairs"), Reason("wrong", "1 == 0", "not this one")]
    found = {kind: (one, reason) for kind, one, reason in differences([*compared(*runs)], reasons)}
    assert {kind: reason for kind, (_, reason) in found.items()} == {"refused": reasons[0], "name": None, "wrong": None}
    assert "assert 0 == 1" in found["wrong"][0].error
    del runs[1][found["name"][0].test]  # as if the run had ended before
    assert {kind for kind, *_ in differences([*compared(*runs)], reasons)} == {"refused", "wrong"}
