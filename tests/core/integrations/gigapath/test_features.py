"""Files of tile features: what is read from each kind, and what is refused by name."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch

from dilkit.integrations.gigapath import hdf5, read_features
from dilkit.integrations.gigapath.features import features_in, others_in

TILES, COORDS = torch.randn(5, 8), torch.arange(10).view(5, 2) * 256


def written(path, tiles=TILES, coords=COORDS, name="features"):
    """The file, with this content."""
    if path.suffix == ".pt":
        torch.save({name: tiles, "coords": coords}, path)
    elif path.suffix == ".npy":
        np.save(path, tiles.numpy())
        np.save(path.with_name(f"{path.stem}.coords.npy"), coords.numpy())
    else:
        h5py = pytest.importorskip("h5py", reason="h5py is not installed")
        with h5py.File(path, "w") as file:
            file[name], file["coords"] = tiles.numpy(), coords.numpy()
    return path


def saying(path, said):
    """The file, with these attributes or entries."""
    if path.suffix == ".pt":
        torch.save({"features": TILES, "coords": COORDS, **said}, path)
        return path
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(written(path), "r+") as file:
        whose = {"encoder": file["features"], "extractor": file, "unit": file}
        for name, value in said.items():
            whose.get(name, file["coords"]).attrs[name] = value
    return path


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".h5"])
@pytest.mark.parametrize("leading", [False, True])
def test_each_kind_is_read(tmp_path, suffix, leading):
    tiles, coords = (TILES[None], COORDS[None]) if leading else (TILES, COORDS)
    found = read_features(written(tmp_path / f"slide{suffix}", tiles, coords))
    assert all(map(torch.equal, found, (TILES, COORDS)))


@pytest.mark.parametrize("suffix", [".pt", ".h5"])
def test_the_other_name_of_features(tmp_path, suffix):
    assert torch.equal(read_features(written(tmp_path / f"slide{suffix}", name="tile_embeds"))[0], TILES)


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
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".npy"])
def test_content_that_does_not_fit_is_named(tmp_path, suffix, tiles, coords, message):
    path = written(tmp_path / f"slide{suffix}", tiles, coords)
    with pytest.raises(ValueError, match=message) as caught:
        read_features(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("coords", [COORDS.half(), COORDS.bool(), COORDS.to(torch.complex64)])
def test_coordinates_that_do_not_hold_every_pixel_are_named(tmp_path, coords):
    with pytest.raises(ValueError, match=f"slide.pt: coords are {coords.dtype}, which does not hold every pixel"):
        read_features(written(tmp_path / "slide.pt", coords=coords))


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
    assert read_features(saying(tmp_path / f"slide{suffix}", said))[2:] == (tile_size, tile_encoder)


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
        read_features(saying(tmp_path / f"slide{suffix}", said))


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
    path = (compressed if suffix == ".npz" else written)(tmp_path / f"slide{suffix}")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=rf"slide{suffix} is (no file of tensors|damaged, or no {suffix} file of numbers)"):
        read_features(path)


def flipped(path, text, value, beyond=0):
    """Replace a byte of the file: the one behind a text, or farther on."""
    content = bytearray(path.read_bytes())
    content[content.index(text) + len(text) + beyond] = value
    path.write_bytes(content)


def claiming(path, tiles):
    """An .h5 file that claims tiles that it does not store."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(path, "w") as file:
        for name, width in (("features", 8), ("coords", 2)):
            file.create_dataset(name, (tiles, width), "f4", chunks=(1000, width))


DAMAGE = {
    "TokenError": ("slide.npy", lambda path: flipped(written(path), b"(5, 8", ord("("))),
    "zlib.error": ("slide.npz", lambda path: flipped(compressed(path), b"features.npy", 255, 20)),
    "KeyError": ("slide.h5", lambda path: flipped(written(path), b"HEAP", 255)),
    "MemoryError": ("slide.h5", lambda path: claiming(path, 10**12)),
    "isfinite of fp8": ("slide.pt", lambda path: written(path, TILES.to(torch.float8_e4m3fn))),
    "isfinite of sparse": ("slide.pt", lambda path: written(path, TILES.to_sparse())),
}


def compressed(path):
    np.savez_compressed(path, features=TILES.numpy(), coords=COORDS.numpy())
    return path


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_a_library_raises_over_a_file_is_an_error_that_names_it(tmp_path, damage):
    name, write = DAMAGE[damage]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=rf"^{tmp_path / name}[: ]") as caught:
        read_features(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe stands in for a file over which HDF5 hangs")
def test_a_file_over_which_hdf5_hangs_ends_nothing_but_its_own_reading(tmp_path, monkeypatch):
    whole = written(tmp_path / "whole.h5")
    read_features(whole)
    os.mkfifo(tmp_path / "hung.h5")
    with monkeypatch.context() as patch:
        patch.setattr(hdf5, "SECONDS", 0.1)
        with pytest.raises(ValueError, match=r"hung\.h5 is damaged: HDF5 was not done with it"):
            hdf5.list_datasets(tmp_path / "hung.h5")
    assert torch.equal(read_features(whole)[0], TILES)


def test_numbers_without_coordinates_beside_them(tmp_path):
    written(tmp_path / "slide.npy")
    (tmp_path / "slide.coords.npy").unlink()
    with pytest.raises(ValueError, match=r"slide\.coords\.npy, an array \(n, 2\), is needed beside it"):
        read_features(tmp_path / "slide.npy")


def test_objects_are_not_read(tmp_path):
    written(tmp_path / "slide.npy")
    np.save(tmp_path / "slide.npy", np.array([{"a": 1}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"no \.npy file of numbers: .*[Oo]bject"):
        read_features(tmp_path / "slide.npy")


def test_without_h5py(tmp_path, monkeypatch):
    (tmp_path / "slide.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"slide\.h5 needs h5py.*pip install h5py, or give \.pt, \.npy or \.npz"):
        read_features(tmp_path / "slide.h5")


def test_other_endings_and_missing_files(tmp_path):
    with pytest.raises(ValueError, match=r"slide\.csv is no file of features; one of \.pt, \.npy, \.npz, \.h5"):
        read_features(tmp_path / "slide.csv")
    with pytest.raises(FileNotFoundError, match=r"slide\.pt"):
        read_features(tmp_path / "slide.pt")


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
