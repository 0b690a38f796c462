"""What training begins with: a published architecture with its weights, or other sizes with random ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.slide_tables import WIDTH, table, tiny_encoder, write_slide

from dilkit.integrations.gigapath import ARCHITECTURES
from dilkit.integrations.gigapath.checkpoint import read_checkpoint
from dilkit.integrations.gigapath.finetuning import look_through, read_labels
from dilkit.integrations.gigapath.finetuning.encoders import check_tile_encoder, config_for, first_encoder
from dilkit.integrations.gigapath.finetuning.slides import SlideFile

SIZES = dict(embed_dim=16, depth=2, num_heads=2)
SLIDES = (SlideFile(Path("a.pt"), 5, 256, WIDTH, "uni_v2"),)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the weights of an architecture that is known while the test runs."""
    encoder = tiny_encoder()
    monkeypatch.setitem(ARCHITECTURES, "tiny", encoder.config)
    torch.save({"model": encoder.state_dict()}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def test_weights_of_a_checkpoint(weights: Path) -> None:
    found = read_checkpoint(weights)
    config = config_for(SLIDES, "tiny", found, dropout=0.5, depth=None)
    encoder = first_encoder(config, found)
    assert (encoder.config.dropout, encoder.config.global_pool, encoder.activation_checkpointing) == (0.5, True, True)
    assert all(torch.equal(weight, encoder.state_dict()[name]) for name, weight in tiny_encoder().state_dict().items())
    with pytest.raises(ValueError, match=r"depth=3: .*weights\.pth is of 'tiny', which has other sizes; leave them out"):
        config_for(SLIDES, "tiny", found, depth=3)


def test_random_weights_depend_on_the_seed_and_take_the_tiles_that_there_are() -> None:
    config = config_for(SLIDES, **SIZES)
    assert (config.in_chans, config.global_pool) == (WIDTH, True)
    first, same, other = (first_encoder(config, seed=seed).cls_token for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_features_of_another_tile_encoder_are_refused() -> None:
    with pytest.raises(ValueError, match=r"features are of 'uni_v2', as a\.pt says, not of 'gigapath'"):
        check_tile_encoder(SLIDES, "gigapath")
    check_tile_encoder(SLIDES, "UNI")


def test_tiles_whose_size_nobody_says(tmp_path: Path) -> None:
    """They are 256 pixels wide if they lie so."""
    labels = read_labels(table(tmp_path, "slide,time,event", "a,1,1"))
    write_slide(tmp_path / "a.pt", 25)
    assert look_through(labels, tmp_path)[0].tile_size == 256
    content = torch.load(tmp_path / "a.pt")
    torch.save({**content, "coords": 2 * content["coords"]}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"line 2: .*512 pixels apart, and neither the file nor tile_size says"):
        look_through(labels, tmp_path)
    assert look_through(labels, tmp_path, tile_size=512)[0].tile_size == 512
