"""Slides that only the places of their tiles tell apart: what is made up, and what is learnt of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilkit.integrations.gigapath.finetuning import read_labels, split_examples
from dilkit.integrations.gigapath.finetuning.made_up import BLOCK, made_up_slide, write_made_up
from dilkit.integrations.gigapath.finetuning.proof import prove


@pytest.mark.parametrize("together", [False, True])
def test_as_many_tiles_are_marked_in_either_class(together: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        tiles, coords = made_up_slide(together, generator)
        marked = coords[tiles[:, 0] > 1.5]
        reach = (marked.max(dim=0).values - marked.min(dim=0).values) // 256 + 1
        assert len(marked) == BLOCK**2
        assert (reach.tolist() == [BLOCK, BLOCK]) == together


def test_the_table_has_every_class_in_every_split(tmp_path: Path) -> None:
    labels = read_labels(write_made_up(tmp_path, 40))
    splits = split_examples(labels)
    assert [len(one) for one in (splits.train, splits.val, splits.test)] == [28, 4, 8]
    assert labels.has_patients


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_encoder_learns_where_tiles_lie_and_their_mean_does_not_say(tmp_path: Path) -> None:
    """Of fewer slides than the module's own command takes, which runs other seeds too."""
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed (pip install dilkit[finetune])")
    proof = prove(tmp_path, seed=0, slides=600, epochs=8)
    assert proof.patients == 60
    assert proof.encoder.value >= 0.95
    assert proof.mean_of_tiles.value <= 0.6
