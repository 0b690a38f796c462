"""Classes of models of transformers with dilated attention: what `eager` attention gives, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install dilkit[transformers])")
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
def test_some_classes(model: tuple[str, str]) -> None:
    found = examine(*model)
    assert found.verdict == QUICK[model], found
    assert (found.every_layer_asks is True) == (found.verdict == EQUAL), found


def test_every_class_was_tried_and_none_is_wrong() -> None:
    """The file that the table of docs/transformers.md is made of."""
    examined = [Examined(**one) for one in json.loads(FILE.read_text())["classes"]]
    assert len(examined) > 700
    assert not [one for one in examined if one.verdict == WRONG]
    assert not [one for one in examined if one.verdict == REFUSED and not one.reason]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_class_of_a_tenth_is_wrong() -> None:
    """All of them take ten minutes of CPU time: `python tests/families/run.py`, when transformers or the integration changes."""
    assert not [one for one in examine_all(classes()[::10]) if one.verdict == WRONG]
