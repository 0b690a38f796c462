"""`--pattern` on the command line."""

import argparse
import json

import pytest
from helpers.command_line import json_output, output
from helpers.pairwise import diagonal

from dilkit import GlobalTokens, Pattern, Problem, SlidingWindow, Strided, explain
from dilkit.tools.cli import main
from dilkit.tools.console.arguments import written_pattern

PATTERN = Pattern.of(SlidingWindow(3), GlobalTokens([4]))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_pattern_is_drawn(as_file, tmp_path, capsys):
    given = PATTERN.to_json()
    if as_file:
        (tmp_path / "pattern.json").write_text(given)
        given = str(tmp_path / "pattern.json")
    assert main(["draw", "--seq", "7", "--heads", "1", "--causal", "--pattern", given, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["pattern"] == json.loads(PATTERN.to_json())
    assert facts["count"] == PATTERN.count(7, 1, is_causal=True).tolist()


WRITTEN = {
    "longformer(512, 16)": Pattern.longformer(512, 16),
    "Pattern.natten((4, 6), kernel_size=3)": Pattern.natten((4, 6), 3),
    "SlidingWindow(8, heads=range(2)), GlobalTokens([3, 9], 'read')": Pattern.of(
        SlidingWindow(8, heads=(0, 2)), GlobalTokens([3, 9], "read")
    ),
    "Pattern.of(Strided(3), overlap='once')": Pattern.of(Strided(3), overlap="once"),
    "Pattern([4, 8], [1, 2])": Pattern([4, 8], [1, 2]),
    "dense()": Pattern.dense(),
}
REFUSED = {
    "longformers(512)": "'longformers' makes no pattern; known are mistral",
    "__import__('os').system('ls')": "makes no pattern",
    "SlidingWindow(0)": "window=0 must be from 1",
    "SlidingWindow(big)": "'big' is no number",
    "SlidingWindow(**{'window': 3})": "write the arguments one by one",
    "SlidingWindow(3, 1, None, 4)": "positional arguments",
    "SlidingWindow(3))": "is no call of Python",
    "longformer": "needs numbers: longformer(window, global_tokens)",
}


@pytest.mark.parametrize("text", WRITTEN)
def test_a_pattern_is_written_as_the_call_that_makes_it(text):
    assert written_pattern(text) == WRITTEN[text]
    if "(" in str(WRITTEN[text]) and "heads" not in text:
        assert written_pattern(str(WRITTEN[text])) == WRITTEN[text]


@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
def test_no_other_text_is_a_pattern(text, reason):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        written_pattern(text)
    assert reason in str(caught.value)


EVERY_KIND = [
    "DilatedSegment(64, 2)",
    "SlidingWindow(9, 2)",
    "GlobalTokens([3, 70])",
    "Strided(7)",
    "BlockSparse([[True, False], [True, True]], 64)",
    "natten((6, 16), (3, 5))",
    "SlidingWindow(5, heads=(0, 1)), Strided(16, heads=(1, 2))",
]


@pytest.mark.parametrize(("text", "is_causal"), diagonal(EVERY_KIND, [False, True]))
def test_plan_counts_pairs_and_says_who_computes_it(text, is_causal, capsys):
    options = ["plan", "--seq", "96", "--heads", "2", "--dim", "8", "--batch", "3", "--dtype", "fp32", "--world-size", "2"]
    given = [*options, "--pattern", text, *(["--causal"] if is_causal else [])]
    found = json_output(capsys, *given)["call"]
    pattern = written_pattern(text)
    problem = Problem(pattern=pattern, seq=96, heads=2, head_dim=8, batch=3, is_causal=is_causal)
    assert sum(branch["pairs"] for branch in found["branches"]) == 3 * int(pattern.count(96, 2, is_causal=is_causal).sum())
    assert sum(branch["flops"] for branch in found["branches"]) == problem.flops()
    assert [branch["kind"] for branch in found["branches"]] == [branch.kind for branch in pattern.branches]
    assert found["dense_pairs"] == 3 * 2 * (96 * 97 // 2 if is_causal else 96**2)
    assert found["memory_bytes"]["results"] == 3 * 96 * 2 * (4 * 8 + 4)
    trace = explain(problem)
    assert (found["picked"], found["why"]) == (trace.picked, trace.why)
    assert f"{trace.picked} computes it" in output(capsys, *given)


def test_a_grid_has_a_length_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DILKIT_TUNED", str(tmp_path / "tuned.json"))
    for command in ("bench", "plan", "draw", "tune", "info"):
        assert main([command, "--pattern", "natten((6, 16), 3)", "--seq", "100"]) == 2
        assert "seq=100: the neighborhood is of a grid of 6 x 16, 96 tokens" in capsys.readouterr().err
