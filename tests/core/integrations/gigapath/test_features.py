"""Files of tile features: what is read from each kind and of each producer, and what is refused by name."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from helpers.slide_encoder import slide, small

from dilkit.integrations.gigapath import hdf5
from dilkit.integrations.gigapath.cohort.listing import ReadSettings
from dilkit.integrations.gigapath.features import features_in, others_in, read_features, read_header

TILES, COORDS = torch.randn(5, 8), torch.arange(10).view(5, 2) * 256


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


def written(path, tiles=TILES, coords=COORDS, name="features", **said):
    if path.suffix == ".pt":
        torch.save({name: tiles, "coords": coords, **said}, path)
    elif path.suffix == ".npy":
        np.save(path, tiles.numpy())
        np.save(path.with_name(f"{path.stem}.coords.npy"), coords.numpy())
    elif path.suffix == ".npz":
        np.savez_compressed(path, features=tiles.numpy(), coords=coords.numpy())
    else:
        of_file = {key: said.pop(key) for key in ("extractor", "unit") if key in said}
        of_features = {key: said.pop(key) for key in ("encoder",) if key in said}
        h5_file(path, of_file | {name: of_features, "coords": said}, **{name: tiles.numpy(), "coords": coords.numpy()})
    return path


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".h5"])
@pytest.mark.parametrize("name", ["features", "tile_embeds"])
def test_each_kind_is_read(tmp_path, suffix, name):
    for tiles, coords in ((TILES, COORDS), (TILES[None], COORDS[None])):
        found = read_features(written(tmp_path / f"slide{suffix}", tiles, coords, name))
        assert all(map(torch.equal, found, (TILES, COORDS)))


@pytest.mark.parametrize(
    ("tiles", "coords", "message"),
    [
        (TILES[:0], COORDS[:0], "the slide has no tiles"),
        (TILES[0], COORDS, r"features \(8,\) and coords \(5, 2\)"),
        (TILES, COORDS[:4], r"coords \(4, 2\); \(n, in_chans\) and \(n, 2\) are needed"),
        (TILES, COORDS[:, :1], r"coords \(5, 1\)"),
        (TILES, COORDS * torch.nan, "coords are not finite"),
        (TILES.long(), COORDS, "features are torch.int64; float16, bfloat16"),
        (TILES / torch.tensor([[1.0], [1], [0], [1], [1]]), COORDS, "features of tile 2 are not finite"),
        (TILES, COORDS.half(), "slide.*: coords are torch.float16, which does not hold every pixel"),
        (TILES, COORDS.bool(), "coords are torch.bool, which does not hold every pixel"),
        (TILES, COORDS.to(torch.complex64), "coords are torch.complex64, which does not hold every pixel"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".npy"])
def test_content_that_does_not_fit_is_named(tmp_path, suffix, tiles, coords, message):
    path = written(tmp_path / f"slide{suffix}", tiles, coords)
    with pytest.raises(ValueError, match=message) as caught:
        read_features(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("said", "tile_size", "tile_encoder"),
    [
        ({}, None, None),
        (dict(patch_size=256, patch_size_level0=512, encoder="gigapath"), 512, "gigapath"),
        (dict(patch_size_level0=512.0, encoder="None"), 512, None),
        (dict(patch_size=256, patch_level=0, extractor="uni_v2"), 256, "uni_v2"),
        (dict(patch_size=256, patch_level=1), None, None),  # of level 1, while coordinates are of level 0
        (dict(patch_size=256, patch_level=0, custom_downsample=2), None, None),
        (dict(patch_size=256, level0_width=2561, level0_height=2562, unit="px"), None, None),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".h5"])
def test_what_a_file_says_of_its_tiles(tmp_path, suffix, said, tile_size, tile_encoder):
    assert read_features(written(tmp_path / f"slide{suffix}", **said))[2:] == (tile_size, tile_encoder)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (dict(patch_size_level0=512.5), "patch_size_level0=.*512.5.* is no whole number"),
        (dict(patch_size_level0="large"), "patch_size_level0=.*large.* is no whole number"),
        (dict(unit="um"), r"coords are in unit='um', and the file does not say.*give microns_per_pixel"),
        (dict(unit="mm"), "coords are in unit='mm'; pixels or micrometres are needed"),
        (dict(unit="um", tile_size_um=-1.0, tile_size_px=224), "tile_size_um=.* is no number above 0"),
        (dict(unit="um", tile_size_um=256.0, tile_size_px=0), "tile_size_px=0 must be at least 1"),
        (
            dict(level0_width=9000, level0_height=2304),
            r"coords of tile 4 are \(2048, 2304\), and 1 lie outside the slide of 9000 x 2304 pixels.*x comes first",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".h5"])
def test_what_does_not_fit_what_a_file_says_is_refused(tmp_path, suffix, said, message):
    with pytest.raises(ValueError, match=rf"slide{suffix}: {message}"):
        read_features(written(tmp_path / f"slide{suffix}", **said))


def test_numbers_in_the_other_byte_order(tmp_path):
    np.save(tmp_path / "slide.npy", TILES.numpy().astype(">f4"))
    np.save(tmp_path / "slide.coords.npy", COORDS.numpy().astype(">i4"))
    tiles, coords, *_ = read_features(tmp_path / "slide.npy")
    assert torch.equal(tiles, TILES)
    assert torch.equal(coords.long(), COORDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([TILES], "holds a list; a dictionary"),
        (TILES, "the coordinates of its tiles are missing; it holds features"),
        ({"coords": COORDS}, "holds coords; coords and one of features or tile_embeds or feats"),
        ({"features": TILES}, "it holds features; coords and one of"),
        ({"features": TILES, "tile_embeds": TILES, "coords": COORDS}, "one of features or tile_embeds or feats are needed"),
        ({"features": [object], "coords": COORDS}, "no file of tensors"),
        ({"features": ["a"], "coords": COORDS}, "features is no array of numbers"),
    ],
)
def test_dictionaries_that_do_not_fit_are_named(tmp_path, content, message):
    torch.save(content, tmp_path / "slide.pt")
    with pytest.raises(ValueError, match=message):
        read_features(tmp_path / "slide.pt")


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".npz", ".h5"])
def test_a_damaged_file_is_named(tmp_path, suffix):
    path = written(tmp_path / f"slide{suffix}")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=rf"slide{suffix} is (no file of tensors|damaged, or no {suffix} file of numbers)"):
        read_features(path)


def claiming(path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(path, "w") as file:
        for name, width in (("features", 8), ("coords", 2)):
            file.create_dataset(name, (10**12, width), "f4", chunks=(1000, width))


DAMAGE = {
    "MemoryError": ("slide.h5", claiming),
    "isfinite of fp8": ("slide.pt", lambda path: written(path, TILES.to(torch.float8_e4m3fn))),
    "isfinite of sparse": ("slide.pt", lambda path: written(path, TILES.to_sparse())),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_errors_of_libraries_name_the_file(tmp_path, damage):
    name, write = DAMAGE[damage]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=rf"^{tmp_path / name}[: ]") as caught:
        read_features(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe stands in for a file over which HDF5 hangs")
def test_a_file_over_which_hdf5_hangs(tmp_path, monkeypatch):
    whole = written(tmp_path / "whole.h5")
    read_features(whole)
    os.mkfifo(tmp_path / "hung.h5")
    with monkeypatch.context() as patch:
        patch.setattr(hdf5, "SECONDS", 0.1)
        with pytest.raises(ValueError, match=r"hung\.h5 is damaged: HDF5 was not done with it"):
            hdf5.list_datasets(tmp_path / "hung.h5")
    assert torch.equal(read_features(whole)[0], TILES)


def alone(path):
    (written(path).with_name("slide.coords.npy")).unlink()


def of_objects(path):
    np.save(written(path), np.array([{"a": 1}]), allow_pickle=True)


def of_a_pickled_scalar(path):
    np.savez(path, features=TILES.numpy(), coords=COORDS.numpy(), tile_size=np.array({"a": 1}, dtype=object))


@pytest.mark.parametrize(
    ("name", "write", "error", "message"),
    [
        ("slide.npy", alone, ValueError, r"slide\.coords\.npy, an array \(n, 2\), is needed beside it"),
        ("slide.npy", of_objects, ValueError, r"no \.npy file of numbers: .*[Oo]bject"),
        ("slide.npz", of_a_pickled_scalar, ValueError, r"no \.npz file of numbers: .*[Oo]bject"),
        ("slide.csv", lambda path: None, ValueError, r"slide\.csv is no file of features; one of \.pt, \.npy, \.npz, \.h5"),
        ("slide.pt", lambda path: None, FileNotFoundError, r"slide\.pt"),
    ],
)
def test_files_without_what_is_needed(tmp_path, name, write, error, message):
    write(tmp_path / name)
    with pytest.raises(error, match=message):
        read_features(tmp_path / name)


def test_without_h5py(tmp_path, monkeypatch):
    (tmp_path / "slide.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"slide\.h5 needs h5py.*pip install h5py, or give \.pt, \.npy or \.npz"):
        read_features(tmp_path / "slide.h5")


def test_folders_are_looked_into(tmp_path):
    for name in ("b.pt", "a.npy"):
        written(tmp_path / name)
    (tmp_path / "notes.txt").write_text("")
    assert [path.name for path in features_in([tmp_path, tmp_path / "b.pt"])] == ["a.npy", "b.pt", "b.pt"]
    assert [path.name for path in others_in([tmp_path, tmp_path / "b.pt"])] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no file of features"):
        features_in([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        features_in([tmp_path / "none.pt"])


TILE = 512
"""Pixels of level 0 a side, which are 256 micrometres and were embedded as 224 pixels."""
N = 30


def cells():
    return slide(N)[1][0] // 256


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


def test_features_of_several_tile_encoders_are_to_be_chosen_from(tmp_path):
    path, _ = atlas_patch(tmp_path, slide(N)[0][0].numpy())
    for given, words in ((None, "name one by tile_encoder"), ("uni", "and 0 of them fit 'uni'; name one")):
        with pytest.raises(ValueError, match=rf"a\.h5 holds features of prov_gigapath, resnet50; {words}"):
            read_features(path, tile_encoder=given)
    assert read_header(path, tile_encoder="resnet50").in_chans == 7


def test_a_file_that_another_program_writes_is_locked(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    path, _ = trident(tmp_path, slide(N)[0][0].numpy())
    with h5py.File(path, "r+", locking=True), pytest.raises(ValueError, match=r"a\.h5 is locked by another program: start again"):
        read_features(path)


def test_a_header_leaves_the_features_alone(tmp_path):
    features = np.full((5, 3), np.nan, dtype="f4")
    np.savez(tmp_path / "a.npz", features=features, coords=COORDS.numpy(), patch_size_level0=TILE)
    written(tmp_path / "b.npy", torch.from_numpy(features))
    written(tmp_path / "c.pt", torch.from_numpy(features)[None])
    for name, size in (("a.npz", TILE), ("b.npy", None), ("c.pt", None)):
        header = read_header(tmp_path / name)
        assert (header.tiles, header.in_chans, header.tile_size) == (5, 3, size)
        with pytest.raises(ValueError, match="features of tile 0 are not finite"):
            read_features(tmp_path / name)


def test_files_of_coordinates_are_no_slides(tmp_path):
    slide2vec(tmp_path, np.zeros((N, 3), dtype="f4"))
    np.savez(tmp_path / "a.coordinates.npz", x=np.zeros(N), y=np.zeros(N))
    assert [path.name for path in features_in([tmp_path])] == ["a.npz"]
    assert [path.name for path in others_in([tmp_path])] == ["tiles"]


def test_coordinates_of_no_slide_or_of_another_are_refused(tmp_path):
    path, options = clam(tmp_path, slide(N)[0][0].numpy())
    with pytest.raises(ValueError, match=r"a\.pt: the folder .* has no coordinates of it: a\.h5, or"):
        read_features(path, coords=tmp_path)
    assert read_header(path, **options).tiles == N
    with pytest.raises(ValueError, match=r"--coords: '.*none' is no folder"):
        ReadSettings(coords=tmp_path / "none")
    path = h5_file(tmp_path / "a.h5", {}, features=slide(N)[0][0].numpy(), coords=(cells() * TILE).int().numpy())
    h5_file(options["coords"] / "a.h5", {}, coords=cells().numpy() * 256)
    with pytest.raises(ValueError, match="its coords differ from those of the file with its coordinates"):
        read_header(path, **options)
