"""A version of transformers that is newer than those tested: each class proves itself once, or is refused, or warned of."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from helpers.language_models import PATTERN, SIZES, llama, transformers

from dilkit.integrations import newer
from dilkit.selection import proof

package = transformers()
from dilkit.integrations.transformers import convert, register  # noqa: E402
from dilkit.integrations.transformers.biases import alibi  # noqa: E402
from dilkit.integrations.transformers.proof import proving, trials  # noqa: E402

LLAMA = "transformers.models.llama.modeling_llama:LlamaForCausalLM"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The classes that were compared, here instead of in a process of their own; every version is newer than those tested."""
    names: list[str] = []

    def outcome(command: list[str]) -> str:
        names.append(command[-1])
        with redirect_stdout(io.StringIO()) as out:
            try:
                proving.main(command[-1])
            except Exception as error:
                return f"its proof crashed: {error}"
        return out.getvalue().strip()

    monkeypatch.setenv("DILKIT_CUDA_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(newer.NEWEST_TESTED, "transformers", "5.0.0")
    monkeypatch.setattr(proof, "_proofs", {})
    monkeypatch.setattr(proof, "outcome", outcome)
    return names


def test_a_class_that_is_right_is_compared_once_for_all_processes(asked: list[str]) -> None:
    convert(llama(), PATTERN)
    proof._proofs.clear()
    register(PATTERN)
    llama(attn_implementation="dilkit")  # with the model within it, of a class of its own
    kind: Any = type("Mine", (package.LlamaForCausalLM,), {"__module__": "no_such_module"})
    convert(kind(package.LlamaConfig(**SIZES)), PATTERN)
    assert asked == [LLAMA]
    assert {x.verdict for x in proof.recorded()} == {"passed"}


def test_a_class_that_drops_its_cache_is_refused(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPT did where it got another name: no error, and other logits, though not always other tokens."""
    register(PATTERN)
    monkeypatch.setattr(alibi, "_with_cached", lambda layer, key, value, **options: (key, value))
    config = package.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=64, attn_implementation="dilkit")
    words = r":MptForCausalLM of transformers .* generation by cached steps is off by .*5\.0\.0"
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            package.MptForCausalLM(config)
        proof._proofs.clear()
    assert len(asked) == 1


def test_a_class_that_takes_padding_for_tokens_is_refused_and_left_as_it_was(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dilkit.integrations.transformers.masks._tokens", lambda *args: None)
    model = llama()
    with pytest.raises(ValueError, match=r"padding on the left is off by .*DILKIT_GPU_PROOF=off"):
        convert(model, PATTERN)
    assert (model.config._attn_implementation, getattr(model.config, "dilkit", None)) == ("sdpa", None)
    monkeypatch.setenv("DILKIT_GPU_PROOF", "off")
    convert(model, PATTERN)
    assert asked == [LLAMA]


def test_a_class_that_cannot_be_made_small_is_warned_of_once(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LARGEST", 10)
    words = r"not all of .*:Llama\w+ could be compared .* it cannot be made small: .* parameters"
    for _ in range(2):
        with pytest.warns(UserWarning, match=words):
            convert(llama(), PATTERN)
        convert(llama(), PATTERN)
        proof._proofs.clear()
    assert asked == [LLAMA, LLAMA.replace("ForCausalLM", "Model")]


def test_a_version_that_is_tested_costs_a_comparison_of_versions(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(newer.NEWEST_TESTED, "transformers", package.__version__)
    monkeypatch.setattr(newer, "full_name", None)
    monkeypatch.setattr("dilkit.environment.gpu_proof", None)
    convert(llama(), PATTERN)
    assert asked == []


@pytest.mark.slow
def test_the_whole_way_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DILKIT_CUDA_CACHE", str(tmp_path / "proofs"))
    monkeypatch.setitem(newer.NEWEST_TESTED, "transformers", "5.0.0")
    convert(llama(), PATTERN)
    assert {x.verdict: x.facts[0] for x in proof.recorded()} == {"passed": LLAMA.replace("ForCausalLM", "Model")}
