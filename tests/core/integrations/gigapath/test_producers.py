"""The same slide as each producer of tile features writes it has the same embedding, and a header is read without features."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers.slide_encoder import slide, small

from dilkit.integrations.gigapath.cohort.settings import ReadSettings
from dilkit.integrations.gigapath.features import features_in, others_in, read_features, read_header

TILE = 512
"""Pixels of level 0 a side, which are 256 micrometres and were embedded as 224 pixels."""
N = 30


def cells():
    return slide(N)[1][0] // 256


def h5_file(path, said, **arrays):
    """An HDF5 file; `said` are attributes of it, or of a dataset where they are a dictionary."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        for name, value in said.items():
            (file[name].attrs.update(value) if isinstance(value, dict) else file.attrs.update({name: value}))
    return path


def trident(folder, tiles):
    of_coords = dict(patch_size=256, patch_size_level0=TILE, level0_magnification=40, target_magnification=20, overlap=0)
    said = {"coords": of_coords | dict(level0_width=20000, level0_height=20000), "features": {"encoder": "gigapath"}}
    return h5_file(folder / "a.h5", said, features=tiles, coords=cells().numpy() * TILE), {}


def clam(folder, tiles):
    """At level 1 of a slide whose level 1 is half as large; tensors alone, the coordinates in another folder."""
    said = {"coords": dict(patch_size=256, patch_level=1, downsample=np.array([2.0001, 2.0003]), name="a")}
    patches = h5_file(folder / "patches" / "a.h5", said, coords=cells().numpy() * TILE)
    torch.save(torch.from_numpy(tiles), folder / "a.pt")
    return folder / "a.pt", dict(coords=patches.parent)


def clam_h5(folder, tiles):
    options = clam(folder, tiles)[1]
    return h5_file(folder / "a.h5", {}, features=tiles, coords=(cells() * TILE).int().numpy()), options


def atlas_patch(folder, tiles):
    """Features of several tile encoders in a group; coordinates with the size and level of the regions read."""
    places = np.hstack((cells().numpy() * TILE, np.full((N, 2), TILE), np.zeros((N, 1)))).astype("i4")
    features = {"features/prov_gigapath": tiles, "features/resnet50": np.zeros((N, 7), "f4")}
    return h5_file(folder / "a.h5", dict(patch_size=256, patch_size_level0=TILE), **features, coords=places), dict(
        tile_encoder="gigapath"
    )


def stamp(folder, tiles):
    """Tiles lie a little beyond multiples of the tile size, as STAMP's do."""
    said = dict(stamp_version="2.3.0", extractor="gigapath", unit="um", tile_size_um=256.0, tile_size_px=224, feat_type="tile")
    return h5_file(folder / "a.h5", said, feats=tiles, coords=cells().numpy().astype("f4") * np.float32(256.01)), {}


def stamp_v2(folder, tiles):
    said = dict(extractor="gigapath", unit="um", tile_size=256.0)
    return h5_file(folder / "a.h5", said, feats=tiles, coords=cells().numpy() * 256.0), dict(microns_per_pixel=0.503)


def slide2vec(folder, tiles):
    x, y = cells().numpy().T * TILE
    (folder / "tiles").mkdir()
    np.savez_compressed(folder / "tiles" / "a.coordinates.npz", tile_index=np.arange(N), x=x, y=y)
    np.savez_compressed(folder / "a.npz", features=tiles, tile_index=np.arange(N))
    said = dict(encoder_name="gigapath", tile_size_lv0=TILE, coordinates_npz_path=str(folder / "tiles" / "a.coordinates.npz"))
    (folder / "a.meta.json").write_text(json.dumps(said))
    return folder / "a.npz", {}


def slide2vec_tiling(folder, tiles):
    """The features moved away from what describes them; the tile size is said by the file of the tiling."""
    slide2vec(folder, tiles)
    (folder / "a.meta.json").unlink()
    (folder / "tiles" / "a.coordinates.meta.json").write_text(json.dumps({"tiling": {"tile_size_lv0": TILE}, "slide": {}}))
    return folder / "a.npz", dict(coords=folder / "tiles")


@pytest.mark.parametrize("producer", [trident, atlas_patch, clam, clam_h5, stamp, stamp_v2, slide2vec, slide2vec_tiling])
def test_a_slide_of_each_producer_has_the_same_embedding(tmp_path, producer):
    tiles, coords = slide(N)
    path, options = producer(tmp_path, tiles[0].numpy())
    features = read_features(path, **options)
    model = small()
    with torch.no_grad():
        [right] = model(tiles, coords)
        model.tile_size = features.tile_size
        [embedding] = model(features.tiles[None], features.coords[None])
    assert torch.equal(embedding, right)
    header = read_header(path, **options)
    assert (header.tiles, header.in_chans, header.tile_size) == (N, tiles.shape[2], features.tile_size)
    assert header.tile_encoder in ("gigapath", "prov_gigapath", None)
    assert producer is not stamp_v2 or header.microns == pytest.approx(256 / 509)


@pytest.mark.parametrize(
    ("tile_encoder", "message"),
    [
        (None, r"a\.h5 holds features of prov_gigapath, resnet50; name one by tile_encoder"),
        ("uni", r"a\.h5 holds features of prov_gigapath, resnet50; and 0 of them fit 'uni'; name one"),
    ],
)
def test_features_of_several_tile_encoders_are_to_be_chosen_from(tmp_path, tile_encoder, message):
    path, _ = atlas_patch(tmp_path, slide(N)[0][0].numpy())
    with pytest.raises(ValueError, match=message):
        read_features(path, tile_encoder=tile_encoder)
    assert read_header(path, tile_encoder="resnet50").in_chans == 7


def test_a_file_that_another_program_writes_is_locked(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path, _ = trident(tmp_path, slide(N)[0][0].numpy())
    with h5py.File(path, "r+", locking=True), pytest.raises(ValueError, match=r"a\.h5 is locked by another program: start again"):
        read_features(path)


def test_a_header_leaves_the_features_alone(tmp_path):
    """Features that are not finite are no matter to it; they are to who reads them."""
    features = np.full((4, 3), np.nan, dtype="f4")
    coords = np.zeros((4, 2), dtype="i4")
    np.savez(tmp_path / "a.npz", features=features, coords=coords, patch_size_level0=TILE)
    np.save(tmp_path / "b.npy", features)
    np.save(tmp_path / "b.coords.npy", coords)
    torch.save({"features": torch.from_numpy(features)[None], "coords": torch.from_numpy(coords)}, tmp_path / "c.pt")
    for name, size in (("a.npz", TILE), ("b.npy", None), ("c.pt", None)):
        header = read_header(tmp_path / name)
        assert (header.tiles, header.in_chans, header.tile_size) == (4, 3, size)
        with pytest.raises(ValueError, match="features of tile 0 are not finite"):
            read_features(tmp_path / name)


def test_files_of_coordinates_are_no_slides(tmp_path):
    slide2vec(tmp_path, np.zeros((N, 3), dtype="f4"))
    np.savez(tmp_path / "a.coordinates.npz", x=np.zeros(N), y=np.zeros(N))
    assert [path.name for path in features_in([tmp_path])] == ["a.npz"]
    assert [path.name for path in others_in([tmp_path])] == ["tiles"]


def test_a_folder_without_coordinates_of_the_slide_is_named(tmp_path):
    path, options = clam(tmp_path, slide(N)[0][0].numpy())
    with pytest.raises(ValueError, match=r"a\.pt: the folder .* has no coordinates of it: a\.h5, or"):
        read_features(path, coords=tmp_path)
    assert read_header(path, **options).tiles == N
    with pytest.raises(ValueError, match=r"--coords: '.*none' is no folder"):
        ReadSettings(coords=tmp_path / "none")


def test_coordinates_of_other_tiles_are_refused(tmp_path):
    path, options = clam_h5(tmp_path, slide(N)[0][0].numpy())
    h5_file(options["coords"] / "a.h5", {}, coords=cells().numpy() * 256)
    with pytest.raises(ValueError, match="its coords are not those of the file with its coordinates"):
        read_header(path, **options)
