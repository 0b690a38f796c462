"""Stored results of `dilkit tune`."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from helpers.calls import Recorder
from helpers.fakes import Fake, registered
from hypothesis import given, strategies as st

import dilkit
from dilkit import Device, Pattern, Problem
from dilkit.environment import TUNED, tuned_file
from dilkit.problem import DTYPES
from dilkit.selection import tuned
from dilkit.selection.tuned_file import TunedEntry, TunedError, TunedKernel, TunedSetup, TunedShape, load, to_text
from dilkit.selector import explain, select

PROBLEM = Problem(pattern=Pattern([16, 32], [1, 2]), seq=64, heads=4, head_dim=8)
HERE = tuned.setup_of(PROBLEM.device)


def entry(problem=PROBLEM, setup=HERE, **seconds):
    return TunedEntry(setup, tuned.shape_of(problem), tuple((seconds or dict(reference=0.1, native=0.2)).items()))


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "dilkit" / "tuned.json"
    path.parent.mkdir()
    monkeypatch.delenv(TUNED.name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DILKIT_BACKEND", raising=False)
    tuned.read_again()
    yield path
    tuned.read_again()


def write(path, *entries):
    path.write_text(to_text(entries))
    tuned.read_again()


def test_the_file_is_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for value, path in (
        ("", tmp_path / "home/.cache/dilkit/tuned.json"),
        (str(tmp_path / "x.json"), tmp_path / "x.json"),
        ("~/x.json", tmp_path / "home/x.json"),
        (" none ", None),
    ):
        monkeypatch.setenv(TUNED.name, value)
        assert tuned_file() == path
    monkeypatch.delenv(TUNED.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned_file() == tmp_path / "dilkit/tuned.json"


def test_a_file_that_is_named_and_not_there_is_said(file, monkeypatch, tmp_path):
    assert tuned.seconds(PROBLEM) == ()  # without a word: nobody asked for the usual one
    monkeypatch.setenv(TUNED.name, str(tmp_path / "misspelt.json"))
    with pytest.warns(UserWarning, match=r"misspelt.json is ignored: there is no such file; measure anew"):
        assert tuned.seconds(PROBLEM) == ()


def test_the_measured_order_is_gone_by(file):
    assert select(PROBLEM).name == "native"
    write(file, entry())
    assert select(PROBLEM).name == "reference"
    assert explain(PROBLEM).why == "measured by `dilkit tune`: reference 100 ms, native 200 ms"
    write(file, entry(sdpa=0.1))
    assert select(PROBLEM).name == "sdpa"
    file.unlink()
    tuned.read_again()
    assert select(PROBLEM).name == "native"


def test_the_operator_goes_by_it(file):
    used = []
    with registered(Recorder("seen", used)):
        x = torch.randn(1, 64, 4, 8)
        dilkit.dilated_attention(x, x, x, PROBLEM.pattern)
        assert not used
        write(file, entry(seen=0.1))
        dilkit.dilated_attention(x, x, x, PROBLEM.pattern)
        assert len(used) == 1


def test_backends_that_are_gone_and_those_unmeasured_do_no_harm(file):
    write(file, entry(gone=0.1, reference=0.2))
    assert select(PROBLEM).name == "reference"
    with registered(Fake("mighty", 1000)):
        assert select(PROBLEM).name == "mighty"


OTHERS = [
    *dict(dtype="float64", head_dim=16, is_causal=True, requires_grad=True, key_padding_mask=True, varlen=True).items(),
    *dict(kv_cache=True, dropout_p=0.1, seq=128, device=Device.assume("cpu")).items(),
    ("device", Device.assume("sm_61")),
    ("pattern", Pattern([16], [1])),
    ("pattern", Pattern([16, 32], [1, 4])),
    ("pattern", Pattern([16, 32], [1, 2], overlap="once")),
    ("pattern", Pattern([16, 32], [1, 2], heads=[(0, 2), (2, 4)])),
]


@pytest.mark.parametrize(("field", "value"), OTHERS, ids=lambda x: x if isinstance(x, str) else "")
def test_other_problems_go_by_the_table(file, field, value):
    write(file, entry())
    assert tuned.seconds(PROBLEM)
    assert tuned.seconds(replace(PROBLEM, **{field: value})) == ()


def test_a_file_that_knows_no_such_features_is_of_calls_without_them(file):
    shape = dict(dtype="float32", head_dim=8, is_causal=False, requires_grad=False, branches="16/1 32/2", seq=64)
    file.write_text(json.dumps(dict(schema=1, entries=[dict(setup=vars(HERE), shape=shape, seconds=dict(reference=0.1))])))
    tuned.read_again()
    assert select(PROBLEM).name == "reference"
    assert tuned.seconds(replace(PROBLEM, key_padding_mask=True)) == ()


@pytest.mark.parametrize("like", [dict(seq=50), dict(seq=90), dict(heads=8, kv_heads=2), dict(batch=3), dict(scale=2.0)], ids=str)
def test_problems_alike_share_an_order(file, like):
    write(file, entry())
    assert tuned.seconds(replace(PROBLEM, **{"kv_heads": None, **like}))


def test_segments_longer_than_the_sequence_are_the_sequence():
    patterns = (Pattern.dense(), Pattern([64], [1]), Pattern([1000], [1]), Pattern([60], [1]))
    assert {tuned.shape_of(replace(PROBLEM, pattern=p)).branches for p in patterns} == {"64/1"}


KERNEL = TunedKernel("triton 3.6.0", "forward", "bfloat16", 64)
GOOD = json.loads(to_text([entry(), TunedEntry(HERE, KERNEL, (("64 x 32, 4 warps, 5 stages", 0.1),))]))


def spoiled(*path, value=None):
    data = json.loads(json.dumps(GOOD))
    place = data
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


FIRST = ("entries", 0)
BAD = [
    ("", "JSONDecodeError"),
    ("[" * 100_000, "RecursionError"),
    (b"\xff\xfe\x00", "UnicodeDecodeError"),
    (spoiled("schema", value=2), "no object with schema 1"),
    (spoiled("entries", value={}), "a list of entries"),
    (spoiled("entries", 0, value=7), "entry 0: entry is no object of seconds, setup, shape"),
    (spoiled(*FIRST, "setup", "torch", value=...), "entry 0: setup is no object of capability, device, dilkit, name, torch"),
    (spoiled(*FIRST, "setup", "torch", value=2.13), "torch=2.13 is no text"),
    (spoiled(*FIRST, "shape", "more", value=1), "entry 0: shape is no object"),
    (spoiled(*FIRST, "shape", "dtype", value="int8"), "dtype='int8' is not known"),
    (spoiled(*FIRST, "shape", "head_dim", value=0), "head_dim=0 must be at least 1"),
    (spoiled(*FIRST, "shape", "is_causal", value=0), "is_causal=0 is a int"),
    (spoiled(*FIRST, "shape", "branches", value=""), "branches='' is no text"),
    (spoiled(*FIRST, "shape", "seq", value=63), "seq=63 is not a power of two"),
    (spoiled("kernels", value={}), "kernels is no list"),
    (spoiled("kernels", 0, "shape", value=GOOD["entries"][0]["shape"]), "entry 1: shape is no object of backend, dtype"),
    (spoiled("kernels", 0, "seconds", value={"64 x 32": 1.0}), "entry 1: '64 x 32' names no sizes of a kernel"),
    (spoiled(*FIRST, "seconds", value={}), "names no backend"),
    (spoiled(*FIRST, "seconds", value={"": 1.0}), "backend='' is no text"),
    (spoiled(*FIRST, "seconds", value={"native": 0}), "native=0.0 must be finite and greater than 0"),
    (spoiled(*FIRST, "seconds", value={"native": "fast"}), "native='fast' is a str"),
]


@pytest.mark.parametrize(("content", "complaint"), BAD, ids=[complaint for _, complaint in BAD])
def test_a_malformed_file_is_ignored_with_one_warning(file, content, complaint):
    raw = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode()
    file.write_bytes(raw)
    tuned.read_again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert {select(replace(PROBLEM, seq=seq)).name for seq in (64, 128, 256)} == {"native"}
        explain(PROBLEM)
    (warning,) = caught
    assert str(file) in str(warning.message)
    assert complaint in str(warning.message)
    assert "`dilkit tune`" in str(warning.message)
    with pytest.raises(TunedError, match=r"tuned\.json: "):
        load(file)


def test_a_warning_made_an_error_is_raised_once(file):
    file.write_text("{")
    tuned.read_again()
    with pytest.raises(UserWarning, match="is ignored"):
        select(PROBLEM)
    assert select(PROBLEM).name == "native"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PLACES = [("schema",), ("entries",), FIRST]
for whole in (FIRST, ("kernels", 0)):
    PLACES += [(*whole, name) for name in GOOD[whole[0]][0]]
    PLACES += [(*whole, part, name) for part in ("setup", "shape", "seconds") for name in GOOD[whole[0]][0][part]]


@given(st.sampled_from(PLACES), JSON)
def test_any_value_anywhere_is_taken_or_refused(tmp_path_factory, place, value):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(spoiled(*place, value=value)))
    try:
        entries = load(path)
    except TunedError:
        return
    for found in entries:
        assert isinstance(found, TunedEntry)
        assert all(isinstance(name, str) and taken > 0 for name, taken in found.seconds)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
SECONDS = st.dictionaries(TEXTS, st.floats(1e-9, 1e9), min_size=1, max_size=4).map(lambda found: tuple(found.items()))
SHAPES = st.builds(
    TunedShape,
    dtype=st.sampled_from(DTYPES),
    head_dim=st.integers(1, 512),
    is_causal=st.booleans(),
    requires_grad=st.booleans(),
    branches=TEXTS,
    seq=st.integers(0, 40).map(lambda power: 1 << power),
    **dict.fromkeys(("key_padding_mask", "varlen", "kv_cache", "dropout"), st.booleans()),
)
SETUPS = st.builds(TunedSetup, *[TEXTS] * 5)
KERNELS = st.builds(TunedKernel, TEXTS, TEXTS, st.sampled_from(DTYPES), st.integers(1, 512))
SIZES = st.lists(st.integers(1, 999), min_size=4, max_size=4).map(lambda x: "{} x {}, {} warps, {} stages".format(*x))
ENTRIES = st.builds(TunedEntry, SETUPS, SHAPES, SECONDS)
SIZED = st.builds(TunedEntry, SETUPS, KERNELS, st.tuples(st.tuples(SIZES, st.floats(1e-9, 1e9))))


@given(st.lists(ENTRIES, max_size=4), st.lists(SIZED, max_size=2))
def test_what_is_written_is_read(tmp_path_factory, entries, sized):
    path = tmp_path_factory.getbasetemp() / "written.json"
    path.write_text(to_text([*sized, *entries]), encoding="utf-8")
    assert load(path) == (*entries, *sized)


@pytest.mark.parametrize(
    ("change", "says"),
    [(dict(torch="1.0"), "torch 1.0"), (dict(dilkit="0.0"), "dilkit 0.0"), (dict(name="Another CPU"), "measured on Another CPU")],
    ids=str,
)
def test_a_stale_file_is_ignored_with_one_warning(file, change, says):
    write(file, entry(setup=replace(HERE, **change)))
    with pytest.warns(UserWarning, match=r"tuned\.json is ignored: measured on") as caught:
        assert {select(replace(PROBLEM, seq=seq)).name for seq in (64, 128)} == {"native"}
    (warning,) = caught
    assert str(file) in str(warning.message)
    assert says in str(warning.message)
    assert f"this is {HERE}" in str(warning.message)


def test_a_file_of_other_devices_beside_ours_is_not_stale(file):
    gpu = replace(HERE, device="cuda", name="NVIDIA H100", capability="9.0")
    write(file, entry(setup=gpu), entry(setup=replace(HERE, torch="1.0")), entry())
    assert select(PROBLEM).name == "reference"
    assert select(replace(PROBLEM, seq=4096)).name == "native"
    write(file, entry(setup=gpu))
    assert select(PROBLEM).name == "native"
    assert tuned.seconds(replace(PROBLEM, device=Device("cuda", "NVIDIA H100", (9, 0))))


def test_the_file_is_read_once(file, monkeypatch):
    write(file, entry())
    read = []
    monkeypatch.setattr(tuned, "load", lambda path: read.append(path) or load(path))
    for seq in (64, 64, 128, 256):
        select(replace(PROBLEM, seq=seq))
        explain(replace(PROBLEM, seq=seq))
    assert read == [file]


def test_the_variable_takes_effect_at_once(file, monkeypatch):
    write(file, entry())
    assert select(PROBLEM).name == "reference"
    monkeypatch.setenv(TUNED.name, "none")
    assert select(PROBLEM).name == "native"
