"""The backend of the CUDA kernels, by a launcher that records."""

import random
import re
from dataclasses import replace

import pytest
import torch
from helpers.calls import starts_of
from helpers.cuda_fakes import RecordingLauncher
from helpers.on_host import FP32
from torch import Tensor

from dilkit import GlobalTokens, Pattern, Problem, SlidingWindow, plan
from dilkit.backends.cuda import prepared_launches, scores
from dilkit.backends.cuda.arguments import VIEWS
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.cuda.prepared_launches import role_launches
from dilkit.backends.tiles.device import KEYS, QUERIES, device_schedule
from dilkit.backends.tiles.schedule import MAX_SEQ, schedule
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.device import Device
from dilkit.inputs import Inputs
from dilkit.testing.tensors import Tensors

pytestmark = pytest.mark.surroundings

GROUPS = Pattern([256, 512, 512], [1, 4, 64])
PASCAL = (6, 1)


def pose(**fields) -> Problem:
    return Problem(**{**dict(pattern=GROUPS, seq=500, heads=4, kv_heads=2, head_dim=16, batch=2), **fields})


def ran(launcher: RecordingLauncher) -> list[tuple[str, bool]]:
    return [(launch.kernel.name, bool(launch.arguments["first"])) for launch in launcher.launches]


@pytest.fixture
def launcher() -> RecordingLauncher:
    return RecordingLauncher()


@pytest.fixture
def backend(launcher: RecordingLauncher) -> CupyRaw:
    return CupyRaw(launcher, PASCAL)


def test_the_kernels_of_gradients_get_lse_contiguous(launcher, backend):
    problem = pose(requires_grad=True)
    q, k, v = Tensors.random(problem).qkv
    lse = torch.zeros(2, 500, 4).transpose(1, 2)
    backend.backward(q, Inputs(q, k, v), q, lse, problem)
    groups = [(name, first) for name in ("fp32_dquery", "fp32_dkeyvalue") for first in (True, False)]
    assert ran(launcher) == [("row_dots", True), *groups]
    assert lse.data_ptr() not in {int(launch.arguments["lse"]) for launch in launcher.launches}
    sizes = [int(launcher.launches[0].arguments[name]) for name in ("batch", "seq", "heads", "tile_count")]
    assert sizes == [problem.batch, problem.seq, problem.heads, 0], "delta is needed of every row, whatever the tiles"


@pytest.mark.parametrize(
    ("resident", "options", "rows"),
    [
        (4, dict(pattern=Pattern([512], [1])), 128),
        (33, dict(pattern=Pattern([512], [1])), 64),
        (4, dict(pattern=Pattern([64], [1])), 64),
        (4, dict(pattern=Pattern([128, 512], [1, 2])), 128),
        (4, dict(pattern=Pattern([128, 256, 512], [1, 2, 4]), is_causal=True), 128),
    ],
    ids=["many tiles", "fewer than run at once", "tall ones half empty", "tall ones in more groups", "causal"],
)
def test_tall_tiles_where_they_suit(resident, options, rows):
    launcher = RecordingLauncher(resident)
    problem = pose(seq=512, dtype="bfloat16", **options)
    CupyRaw(launcher, (9, 0)).forward(Inputs(*Tensors.random(problem).qkv), problem)
    assert {launch.kernel.tile_rows for launch in launcher.launches} == {rows}
    assert {launch.kernel.name for launch in launcher.launches} == {"mma_forward"}


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("hopper_forward", {}, {}),
        ("hopper_forward", dict(head_dim=104, is_causal=True, key_padding_mask=True), {}),
        ("hopper_forward", dict(dtype="float16", pattern=replace(GROUPS, overlap="once")), {}),
        ("mma_forward", {}, dict(hopper=False)),
        ("mma_forward", {}, dict(capability=(10, 0))),
        ("mma_forward", {}, dict(tile_rows=64)),
        ("fp32_forward", dict(dtype="float32"), {}),
        *(
            ("mma_forward", changes, {})
            for changes in (
                *(dict(head_dim=48), dict(head_dim=65, seq=130), dict(head_dim=62), dict(softcap=2.0), dict(bias=BiasForm())),
                *(dict(dropout_p=0.5), dict(varlen=True), dict(pattern=Pattern.of(SlidingWindow(9)))),
            )
        ),
    ],
    ids=str,
)
def test_the_kernel_for_hopper_is_taken_where_it_is_asked_for_and_serves(name, changes, options):
    problem = pose(**{**dict(seq=512, dtype="bfloat16", head_dim=64), **changes})
    own = CupyRaw(RecordingLauncher(), **{**dict(capability=(9, 0), tile_rows=128, hopper=True), **options})
    strides = ((problem.heads * problem.head_dim * problem.seq, problem.heads * problem.head_dim, problem.head_dim),) * len(VIEWS)
    facts = "forward", problem, CPU, problem.seq, 1 if problem.varlen else None, strides, True
    call = prepared_launches.LaunchFacts(*facts, own.launcher, own.capability, own.tile_rows, own.hopper)
    assert role_launches(call).kernel.name == name
    if not options and problem.head_dim % 8 == 0:  # the detail knows neither strides nor tiles
        assert own.detail(problem).endswith(name)


@pytest.mark.parametrize(("resident", "counted"), [(3, True), (10**6, False)])
def test_resident_blocks_take_the_tiles_in_turns(resident, counted):
    launcher = RecordingLauncher(resident)
    problem = pose()
    CupyRaw(launcher, PASCAL).forward(Inputs(*Tensors.random(problem).qkv), problem)
    for launch in launcher.launches:
        items = len(launch.tiles) * problem.batch
        assert launch.blocks == min(items, resident)
        assert launch.counter == (0 if counted else None)


def test_launches_of_a_role_share_a_counter(backend, launcher):
    counters = iter([8, 16])
    launcher.counter = lambda device: next(counters)
    launcher.launch = lambda kernel, blocks, arguments, device: launcher.launches.append(int(arguments["counter"]))
    for _ in range(2):
        backend.forward(Inputs(*Tensors.random(pose()).qkv), pose())
    assert launcher.launches == [8, 8, 16, 16]


def test_a_group_without_tiles_is_not_launched(launcher, backend):
    problem = pose(pattern=Pattern([64, 512], [1, 64], heads=[None, (3, 4)]), seq=3, kv_heads=4)
    assert [len(group.query_tiles) > 0 for group in schedule(problem, 64).groups] == [True, False]
    backend.forward(Inputs(*Tensors.random(problem).qkv), problem)
    assert ran(launcher) == [("fp32_forward", True)]


def misaligned(x: Tensor) -> Tensor:
    y = torch.zeros(x.numel() + 8, dtype=x.dtype)
    return y[1 : 1 + x.numel()].view(x.shape)


@pytest.mark.parametrize(
    ("change", "head_dim", "vector"),
    [
        (lambda x: x, 16, 1),
        (lambda x: x, 12, 1),
        (lambda x: x, 10, 0),
        (misaligned, 16, 0),
        (lambda x: torch.zeros(*x.shape[:3], 18, dtype=x.dtype)[..., :16], 16, 0),
        (lambda x: torch.zeros(*x.shape[:3], 20, dtype=x.dtype)[..., :16], 16, 1),
        (lambda x: x[:1].expand(x.shape), 16, 1),
    ],
)
def test_wide_loads_only_where_every_row_allows_them(launcher, backend, change, head_dim, vector):
    problem = pose(head_dim=head_dim)
    q, k, v = Tensors.random(problem).qkv
    backend.forward(Inputs(q, k, change(v)), problem)
    assert {launch.kernel.macros["VECTOR"] for launch in launcher.launches} == {vector}


def test_strides_that_are_never_taken_do_not_count(launcher, backend):
    problem = pose(batch=1)
    q, k, v = Tensors.random(problem).qkv
    backend.forward(Inputs(q.as_strided(q.shape, (7, *q.stride()[1:])), k, v), problem)
    assert launcher.launches[0].kernel.macros["VECTOR"] == 1


@pytest.mark.parametrize(("apart", "vector"), [(2**30, False), (2**30 - 4, True)])
def test_no_wide_loads_of_rows_too_far_apart(apart, vector):
    problem, strides = pose(batch=1, seq=2, heads=1, kv_heads=1), ((0, apart, 16), *[(0, 0, 0)] * (len(VIEWS) - 1))
    call = prepared_launches.LaunchFacts("forward", problem, CPU, 2, None, strides, True, RecordingLauncher(), PASCAL, None)
    assert role_launches(call).kernel.macros["VECTOR"] == vector


def test_tables_are_copied_once(backend, launcher, monkeypatch):
    problem = pose()
    plan.cache_clear()
    for _ in range(2):
        backend.forward(Inputs(*Tensors.random(problem).qkv), problem)
    assert plan.cache_info().misses == 3, "the forms, the schedule, and its copy on the device"
    first, second = launcher.launches[0].arguments, launcher.launches[2].arguments
    assert first["tiles"] == second["tiles"]


def test_a_prepared_launch_has_the_addresses_of_its_call(backend, launcher):
    """Also those of tables that were dropped from the cache, and made again elsewhere."""
    problem, elsewhere = pose(key_padding_mask=True), list[Tensor]()
    role_launches.cache_clear()
    for _ in range(2):
        plan.cache_clear()
        inputs = Inputs(*Tensors.random(problem).qkv, key_padding_mask=torch.zeros(500, 2, dtype=torch.bool).T)
        out, lse = backend.forward(inputs, problem)
        for launch in launcher.launches[-2:]:
            found = [int(launch.arguments[name]["data"]) for name in ("query", "key", "value", "out")]
            found += [int(launch.arguments[name]) for name in ("mask", "lse")]
            assert found == [x.data_ptr() for x in (*inputs[:3], out, inputs.key_padding_mask, lse)]
        elsewhere += (*inputs[:4], device_schedule(problem, 64, QUERIES, CPU).data)
    assert role_launches.cache_info().misses == 1
    of_calls = [[launch.tiles for launch in launcher.launches[first : first + 2]] for first in (0, 2)]
    assert of_calls[0] == of_calls[1]
    assert launcher.launches[0].arguments["tiles"] != launcher.launches[2].arguments["tiles"]


def test_launches_are_prepared_for_each_device_layout_and_number_of_sequences():
    launcher, strides = RecordingLauncher(), ((0, 64, 16), *[(0, 0, 0)] * (len(VIEWS) - 1))
    launcher.resident = lambda kernel, device: 7 + device.index
    call = prepared_launches.LaunchFacts(
        "forward", packed(), torch.device("cuda", 0), 512, 3, strides, True, launcher, PASCAL, None
    )
    changes = {}, dict(device=torch.device("cuda", 1)), dict(aligned=False), dict(sequences=5), dict(rows=600), dict(rows=0)
    prepared = [role_launches(call._replace(**change)) for change in changes]
    assert [x.launches[0].blocks for x in prepared] == [7, 8, 7, 7, 7, 0]
    assert [x.kernel.macros["VECTOR"] for x in prepared] == [1, 1, 0, 1, 1, 1]
    assert len({x.launches[0].counts for x in prepared}) == 4, "of neither device nor alignment"


def test_forward_alone_copies_no_tiles_of_keys(backend, monkeypatch):
    problem = pose()
    plan.cache_clear()
    backend.forward(Inputs(*Tensors.random(problem).qkv), problem)
    monkeypatch.setattr("dilkit.backends.tiles.kept.capturing", lambda device: True)
    found = device_schedule(problem, 64, QUERIES, torch.device("cpu"))
    groups = schedule(problem, 64).groups
    assert found.nbytes == found.data.nbytes == sum(group.branches.nbytes + group.query_tiles.nbytes for group in groups)


def test_what_a_graph_captured_stays(backend, launcher, monkeypatch):
    problem, captures = pose(seq=444), True
    monkeypatch.setattr("dilkit.backends.tiles.kept.capturing", lambda device: captures)
    plan.cache_clear()
    with pytest.raises(RuntimeError, match=r"while a CUDA graph is captured: make the same call once before"):
        backend.forward(Inputs(*Tensors.random(problem).qkv), problem)
    captures = False
    backend.forward(Inputs(*Tensors.random(problem).qkv), problem)
    captures = True
    backend.forward(Inputs(*Tensors.random(problem).qkv), problem)
    plan.cache_clear()
    captured = launcher.launches[-1]
    torch.zeros(10**6)
    again = RecordingLauncher()
    again.launch(captured.kernel, 1, captured.arguments, torch.device("cpu"))
    assert again.launches[0].tiles == captured.tiles


@pytest.mark.parametrize("resident", [10**6, 4])
def test_nothing_but_torch_allocates_and_only_results(backend, monkeypatch, resident):
    problem, made = pose(requires_grad=True), []
    backend.launcher = RecordingLauncher(resident)
    q, k, v = Tensors.random(problem).qkv
    out, lse = backend.forward(Inputs(q, k, v), problem)
    backend.backward(q, Inputs(q, k, v), out, lse, problem)
    makers = [(torch, name) for name in ("empty", "empty_like", "zeros", "from_numpy")]
    for owner, name in (*makers, (torch.Tensor, "new_empty"), (torch.Tensor, "new_zeros")):
        true = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, true=true, **o: made.append(true(*a, **o)) or made[-1])
    backend.forward(Inputs(q, k, v), problem)
    assert [x.shape for x in made] == [lse.shape, q.shape]
    made.clear()
    backend.backward(q, Inputs(q, k, v), out, lse, problem)
    assert [x.shape for x in made] == [lse.shape, q.shape, k.shape, v.shape]


def test_too_many_tiles_are_refused(backend, monkeypatch):
    problem = pose()
    monkeypatch.setattr(prepared_launches, "MOST_ITEMS", 10)
    with pytest.raises(ValueError, match=r"tiles over the batch, at most 10; use a smaller batch"):
        backend.forward(Inputs(*Tensors.random(problem).qkv), problem)


SCATTERED = GlobalTokens(random.Random(0).sample(range(500), 220))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(is_causal=True, key_padding_mask=True, requires_grad=True, dtype="bfloat16", head_dim=128), "$"),
        (dict(pattern=Pattern([4] * 33, [1] * 33)), "$"),
        (dict(pattern=Pattern.of(GlobalTokens(range(0, 500, 2)), SlidingWindow(9))), "$"),
        (dict(pattern=Pattern.of(SCATTERED)), r"runs of global tokens \d+: at most 64 \(fewer"),
        (dict(device=Device.assume("cpu")), "device cpu: runs on cuda"),
        (dict(device=replace(Device.assume("sm_52"), capability=(5, 0))), r"capability 5\.0: at least 5\.2 is needed"),
        (dict(dtype="float64"), "dtype float64: computes bfloat16, float16, float32"),
        (dict(head_dim=129), "head_dim 129: at most 128"),
        (dict(seq=2**30 + 1), "seq 1073741825: at most 1073741824"),
        (dict(pattern=Pattern([4] * 33, [1] * 33, overlap="once")), 'branches 33: at most 32 with overlap="once"'),
    ],
)
def test_refusals(fields, text, monkeypatch):
    monkeypatch.setattr("dilkit.backend._installed", lambda module: True)
    assert re.match(text, "; ".join(map(str, CupyRaw().refusals(pose(**dict(device=Device.assume("sm_80")) | fields)))))


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("dilkit.backend._installed", lambda module: module != "cupy")
    [refusal] = CupyRaw().refusals(pose(device=Device.assume("sm_80")))
    assert str(refusal) == "module cupy: not installed (pip install 'dilkit[cuda]')"


@pytest.mark.parametrize(
    ("device", "dtype", "text"),
    [
        ("sm_61", "float32", "fp32 on CUDA cores; fp32_forward"),
        ("sm_61", "float16", "fp32 arithmetic; the float16 units of this GPU run at 1/64 of the float32 rate; fp32_forward"),
        (
            "sm_52",
            "float16",
            "fp32 arithmetic; there is no float16 arithmetic on this GPU; what it saves is memory",
        ),
        ("sm_70", "float16", "fp32 arithmetic; tensor cores before 7.5"),
        ("sm_75", "float16", "tensor cores; mma_forward"),
        ("sm_75", "bfloat16", "fp32 arithmetic; no GPU below 8.0 has bfloat16 units; fp32_forward"),
        ("sm_90", "bfloat16", "tensor cores; mma_forward"),
    ],
)
def test_detail_says_what_would_run_and_why(device, dtype, text):
    problem = pose(device=Device.assume(device), dtype=dtype)
    assert CupyRaw().detail(problem).startswith(text)
    with_gradients = CupyRaw().detail(replace(problem, requires_grad=True))
    assert "row_dots" in with_gradients
    assert with_gradients.endswith("_dkeyvalue")
    assert "head_dim 40 computed as 48: 1.20 times the multiplications" in CupyRaw().detail(replace(problem, head_dim=40))


CPU = torch.device("cpu")
PATTERN = Pattern([64, 256, 512], [1, 4, 64])
LENGTHS = [0, 5, 300, 0, 1, 512, 64]


def packed(**options) -> Problem:
    return Problem(**{**dict(pattern=PATTERN, seq=512, heads=4, kv_heads=2, head_dim=16, varlen=True), **options})


@pytest.mark.parametrize("kind", [QUERIES, KEYS])
def test_each_row_of_each_sequence_is_in_one_tile(kind):
    """Tiles begin before a sequence's end, and the last one ends with it."""
    heads = 4 if kind == QUERIES else 2
    first, *_ = device_schedule(packed(), 64, kind, CPU).groups
    ends = first.tile_ends(starts_of(LENGTHS)).tolist()
    table = first.group.query_tiles if kind == QUERIES else first.group.key_tiles
    table = table[table["row"].argsort(kind="stable")]
    assert first.rows is not None
    assert first.rows.tolist() == table["row"].tolist()
    for length, begin, end in zip(LENGTHS, [0, *ends], ends, strict=False):
        found = [
            (int(tile["head"]), row)
            for tile in table[: end - begin]
            for row in range(int(tile["row"]), length, int(tile["step"]))[: int(tile["rows"])]
        ]
        assert sorted(found) == [(head, row) for head in range(heads) for row in range(length)]


def test_nothing_is_read_of_the_lengths(monkeypatch):
    """Reading would wait for a GPU; one preparation serves all lengths."""

    def refuse(*_):
        raise AssertionError("a number of a tensor is read")

    plan.cache_clear()
    launcher, entries = RecordingLauncher(), []
    for lengths in ([100, 412, 0], [500, 12, 0]):
        q, k, v = (torch.zeros(1, 512, heads, 16) for heads in (4, 2, 2))
        lse, places = torch.zeros(1, 4, 512), starts_of(lengths)
        with monkeypatch.context() as reading:
            for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
                reading.setattr(Tensor, name, refuse)
            CupyRaw(launcher, FP32).forward(Inputs(q, k, v, cu_seqlens=places), packed())
            CupyRaw(launcher, FP32).backward(q, Inputs(q, k, v, cu_seqlens=places), q, lse, packed())
        entries.append(plan.cache_info().entries)
    assert entries[0] == entries[1]
    dots = [launch for launch in launcher.launches if launch.kernel.name == "row_dots"]
    others = [launch for launch in launcher.launches if launch.kernel.name != "row_dots"]
    assert {(int(x.arguments["batch"]), int(x.arguments["seq"])) for x in dots} == {(1, 512)}
    assert {(int(x.arguments["batch"]), int(x.arguments["seq"])) for x in others} == {(3, 512)}
    assert all(x.kernel.macros["PACKED"] and x.arguments["starts"] and x.arguments["tile_ends"] for x in others)


def test_rows_are_numbered_in_32_bits():
    q = torch.zeros(1, 1, 4, 16).expand(1, MAX_SEQ + 1, 4, 16)
    with pytest.raises(ValueError, match=f"query has {MAX_SEQ + 1} rows; at most {MAX_SEQ} in all sequences"):
        CupyRaw(RecordingLauncher(), FP32).launch_role("forward", dict(query=q, key=q, value=q), packed())


PLANE = BiasForm(dims=2, metric="max", placed=True, learned=True)
SCORED = Problem(pattern=Pattern([32, 64], [1, 2]), seq=100, heads=2, head_dim=16, requires_grad=True)


def macros(problem: Problem, role: str) -> tuple[tuple[str, int], ...]:
    return scores.macros(role, problem.softcap > 0, problem.bias)


def test_a_kernel_is_compiled_with_what_a_call_has_alone():
    assert macros(SCORED, "forward") == ()
    capped, biased = replace(SCORED, softcap=2.0), replace(SCORED, bias=PLANE)
    assert dict(macros(capped, "dkeyvalue")) == dict(SOFTCAP=1)
    assert macros(capped, "dots") == ()
    assert dict(macros(biased, "forward")) == dict(BIASED=1, PLACED=1, DIMS=2, METRIC=2)
    assert dict(macros(biased, "dquery")) == dict(BIASED=1, PLACED=1, DIMS=2, METRIC=2, LEARNED=1)
    table = replace(SCORED, bias=BiasForm(sizes=(7,), metric="euclidean"), softcap=3.0)
    assert dict(macros(table, "dquery")) == dict(SOFTCAP=1, BIASED=2)


def test_blocks_that_sum_gradients_of_weights_have_tiles_of_their_own(monkeypatch):
    """No counter gives them out, and parts of many entries leave room for few blocks."""
    launcher = RecordingLauncher(resident=3)
    backend = CupyRaw(launcher, PASCAL)
    form = BiasForm(sizes=(5,), learned=True)
    problem = replace(SCORED, bias=form)
    q, lse = torch.zeros(1, 100, 2, 16), torch.zeros(1, 2, 100)
    inputs = Inputs(q, q, q, bias=LoweredBias(form, torch.zeros(2, 5)))
    for _ in range(2):
        backend.backward(q, inputs, q, lse, problem)
        monkeypatch.setattr(scores, "MOST_PART_BYTES", 2 * 4 * 5 * (128 + 2))
    of_queries = [launch for launch in launcher.launches if launch.kernel.name == "fp32_dquery"]
    assert [launch.blocks for launch in of_queries] == [3, 3, 2, 2]
    assert all(launch.counter is None and launch.arguments["bias_parts"] for launch in of_queries)
    assert all(launch.kernel.macros["LEARNED"] == 1 for launch in of_queries)
