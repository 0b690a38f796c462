"""Files of models that are damaged, truncated or foreign: a ValueError that names the file, or the very weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dilkit.tools.demo.text.model import ByteTransformer, ModelConfig, load_model, save_model

SMALL = ModelConfig(context=64, width=16, layers=1, heads=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "model.pt"
    save_model(ByteTransformer(SMALL), path)
    return path


def same(path: Path, weights: dict[str, Any]) -> bool:
    """Whether `path` is refused, or holds these very weights."""
    try:
        found = load_model(path).state_dict()
    except ValueError as error:
        return str(path) in str(error) and len(str(error).splitlines()) == 1
    return found.keys() == weights.keys() and all(torch.equal(x, weights[name]) for name, x in found.items())


def test_a_model_is_what_was_saved_and_can_be_trained_on(saved: Path) -> None:
    model = load_model(saved)
    assert all(x.requires_grad and x.device.type == "cpu" for x in model.parameters())
    model.bits_per_byte(torch.zeros(1, 9, dtype=torch.uint8)).backward()


def test_a_flipped_byte_is_refused_or_changes_nothing(saved: Path, tmp_path: Path) -> None:
    content, weights = saved.read_bytes(), load_model(saved).state_dict()
    places = [*range(0, len(content), 997), *range(60), *range(len(content) - 60, len(content))]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 + place % 255
        (tmp_path / "model.pt").write_bytes(damaged)
        assert same(tmp_path / "model.pt", weights), f"byte {place} of {len(content)}"


def test_a_truncated_model_is_refused(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    for length in (*range(0, len(content), 1999), len(content) - 1):
        (tmp_path / "model.pt").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.pt' holds no model"):
            load_model(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "change",
    [dict(width=10**9), dict(layers=10**9), dict(layers=2), dict(heads=3), dict(context=-1), dict(context="x"), dict(depth=3)],
    ids=str,
)
def test_sizes_that_are_not_those_of_the_weights_are_refused(saved: Path, change: dict[str, Any], tmp_path: Path) -> None:
    content = torch.load(saved, weights_only=True)
    torch.save(content | dict(config=content["config"] | change), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt' holds no model"):
        load_model(tmp_path / "model.pt")
