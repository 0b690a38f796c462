"""`dilkit demo --llama` from end to end, for a few steps."""

from helpers.language_models import transformers

from dilkit.tools import cli
from dilkit.tools.report import registry

transformers()
from dilkit.tools.demo.llama import job  # noqa: E402


def test_both_trainings_go_on_from_the_same_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "CONTEXT", 64)
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for text in texts:
        text.write_text(f"{text.name} in little words " * 40)
    words = ["demo", "--llama", "--steps", "2", "--text", *map(str, texts), "--out", str(tmp_path)]
    assert cli.main([*words, "--image"]) == 2
    assert "--image: has no meaning with --llama" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert "model.layers.3.self_attn (LlamaAttention): sdpa -> Pattern([128, 1024], [1, 8])" in capsys.readouterr().err
    before, dilated, full = registry.read(tmp_path / "report.json").trainings
    assert before.points[-1].held_out == full.points[0].held_out != dilated.points[0].held_out
    assert full.points[-1].held_out < before.points[0].held_out
    assert f"{dilated.points[-1].held_out:.3f} after 2 steps more" in registry.sentence_of(tmp_path / "report.json")
