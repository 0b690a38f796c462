"""The CUDA kernels on the CPU, over several tiles and groups."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.host_compile import KERNELS
from helpers.host_launcher import HostLauncher
from helpers.on_host import FP32, TENSOR_CORES, Compiled, OnHost, both_passes, judged

from dilkit import Pattern
from dilkit.backends.cuda.table import HEAD_DIMS
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS
from dilkit.testing.problems import NESTED, Case
from dilkit.testing.tensors import make_tensors

slow = pytest.mark.slow
TURING, SMALLER, HOPPER, BLACKWELL = (7, 5), (8, 6), (9, 0), (12, 0)

DEEP, DEEPER = Pattern([256, 512], [1, 2]), Pattern([512, 1000], [1, 4])
THREE, GROUPS = Pattern([128, 256, 512], [1, 2, 4]), Pattern([64, 128, 512], [1, 4, 16])
TWO_GROUPS = Pattern([256, 512, 960], [1, 2, 16])
IN_FP32 = {
    "several of a class": {},
    "causal": dict(is_causal=True),
    "groups": dict(pattern=GROUPS, heads=4, seq=515),
    "groups masked batch": dict(pattern=GROUPS, batch=2, mask="left", is_causal=True, seq=200),
    "grouped heads causal": dict(heads=4, kv_heads=2, is_causal=True, mask="random", seq=300),
    "wide causal half": dict(head_dim=120, seq=200, is_causal=True, dtype="float16"),
    "wide groups": dict(head_dim=128, seq=300, dtype="bfloat16", pattern=Pattern([64, 256], [1, 8]), kv_heads=1),
    "33 of 48 once": dict(head_dim=33, seq=210, pattern=Pattern([64, 192], [1, 3], overlap="once")),
    "huge": dict(values="huge", seq=210, gradients=False),
}
WAYS = {
    "low": (TENSOR_CORES, LOW_ROWS),
    "two slots": (TENSOR_CORES, MOST_ROWS),
    "eight warps": (SMALLER, MOST_ROWS),
    "hopper": (HOPPER, MOST_ROWS),
    "turing": (TURING, LOW_ROWS),
    "spare": (BLACKWELL, MOST_ROWS),
}
"""Kernels on tensor cores that differ, most of all for head_dim 128: the capability they are for, and the rows of tiles."""
BOTH = "two slots", "low"
ON_TENSOR_CORES = {
    "classes": (BOTH, dict(pattern=DEEPER, seq=1000)),
    "groups": (BOTH, dict(pattern=Pattern([128, 512], [1, 16]), seq=515, heads=3)),
    "two groups causal": (tuple(WAYS), dict(pattern=TWO_GROUPS, seq=700, head_dim=120, is_causal=True, dtype="float16")),
    "groups of key heads causal": (BOTH, dict(pattern=Pattern([64, 384], [1, 3]), seq=400, heads=4, kv_heads=2, is_causal=True)),
    "a row more than a tile": (tuple(WAYS), dict(pattern=Pattern.dense(), seq=65, is_causal=True, dtype="float16")),
    "33 of 48 once": (BOTH, dict(pattern=Pattern([128, 384], [1, 3], overlap="once"), seq=400, head_dim=33)),
    "120 of 128 causal": (("two slots", "turing"), dict(pattern=DEEP, seq=300, head_dim=120, kv_heads=1, is_causal=True)),
    "128 huge": (tuple(WAYS), dict(pattern=DEEPER, seq=300, head_dim=128, values="huge", gradients=False)),
    "128 negative scale": (("hopper", "low"), dict(pattern=DEEP, seq=200, head_dim=128, scale=-0.2, values="large key")),
}
QUICK = {
    *(("grouped heads causal", "900"), ("wide causal half", "610"), ("huge", "610")),
    *(("groups", "two slots"), ("two groups causal", "hopper"), ("128 huge", "eight warps")),
    *(("a row more than a tile", "low"), ("a row more than a tile", "spare")),
}
"""The others are slow, for what has to be compiled; `make kernels` runs the problem list with every head_dim."""


def larger() -> list[Any]:
    """Yield each case in fp32 on two kinds of GPU with their own copies to shared memory, and on tensor cores."""
    sizes = dict(feature="tiles", head_dim=64, batch=1, heads=2)
    found: list[tuple[str, Case, tuple[Any, ...]]] = []
    for variant, fields in IN_FP32.items():
        case = Case(**{**sizes, **dict(variant=variant, seq=500, pattern=THREE), **fields})
        found += [(str(arch), case, (FP32, Compiled(arch=arch))) for arch in (610, 900)]
    for variant, (ways, fields) in ON_TENSOR_CORES.items():
        case = Case(**{**sizes, **dict(variant=variant, dtype="bfloat16"), **fields})
        for way in ways:
            own = replace(case, dtype="float16") if way == "turing" else case
            found.append((way, own, (WAYS[way][0], Compiled(), WAYS[way][1])))
    return [
        pytest.param(case, how, marks=[] if (case.variant, way) in QUICK else slow, id=f"{way} {case.name}")
        for way, case, how in found
    ]


@pytest.mark.parametrize(("case", "how"), larger())
def test_larger_problems(case, how):
    result = judged(case, *how)
    assert result.verdict == "passed", result


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim"),
    [
        (TENSOR_CORES, "float16", 128),
        (FP32, "float32", 16),
        pytest.param(TENSOR_CORES, "float16", 16, marks=slow),
        *(pytest.param(FP32, "float32", dim, marks=slow) for dim in (32, 128)),
        *(pytest.param(FP32, dtype, dim, marks=slow) for dtype, dim in (("float16", 48), ("bfloat16", 64))),
        *(pytest.param(one, "float16", dim, marks=slow) for one, dim in ((TENSOR_CORES, 32), (TURING, 64), (SMALLER, 128))),
        *(pytest.param(one, "float16", dim, marks=slow) for one, dim in ((HOPPER, 128), (BLACKWELL, 32), (BLACKWELL, 64))),
    ],
)
def test_the_same_bits_in_any_order_and_with_any_loads(capability, dtype, head_dim):
    sizes = dict(batch=1, heads=2, kv_heads=1, seq=140, head_dim=head_dim, dtype=dtype)
    case = Case(feature="bits", variant="", pattern=NESTED, is_causal=True, mask="random", values="ignored NaN", **sizes)
    if head_dim == 16:
        case = replace(case, bias="clipped" if capability == FP32 else "max")  # whose weights have gradients
    elif capability != FP32:
        case = replace(case, pattern=DEEP, seq=200)
    want = both_passes(case, capability, Compiled(workers=1))
    for order, seed, workers, arch, vector in (("reverse", 0, 1, 0, 1), ("random", 1, 3, 900, 1), ("random", 2, 2, 0, 0)):
        blocks = 1 if head_dim == 16 else workers  # each of which sums gradients of weights for itself
        found = both_passes(case, capability, Compiled(order, seed, blocks, arch=arch, vector=vector))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert len(found) == 5 + (head_dim == 16)


PATTERNS = {
    "groups": dict(pattern=Pattern([64, 192], [1, 32]), seq=202, is_causal=True, mask="random", kv_heads=1),
    "deep": dict(pattern=DEEP, seq=230, is_causal=True, mask="random", kv_heads=1),
    "tall": dict(pattern=Pattern([256, 512], [1, 2]), seq=290, heads=1),
    "packed": dict(pattern=Pattern([64, 192], [1, 32]), lengths=(3, 150, 0, 1, 70), seq=224, is_causal=True, kv_heads=1),
    "changed": dict(pattern=Pattern([64, 192], [1, 32]), seq=202, is_causal=True, kv_heads=1, softcap=2.0, dropout_p=0.2),
}
KINDS = [(FP32, "float32"), (FP32, "float16"), (FP32, "bfloat16"), (TURING, "float16"), (TENSOR_CORES, "bfloat16")]
CHECKED = [
    ("groups", FP32, "float32", 32, {}),  # whose libraries the test of bank conflicts uses, too
    ("deep", TENSOR_CORES, "float16", 128, {}),
    *(pytest.param("groups", FP32, "float32", *how, marks=slow) for how in ((32, dict(arch=610)), (40, dict(arch=900)))),
    *(pytest.param("groups", FP32, "float16", dim, {}, marks=slow) for dim in (16, 48, 64, 128)),
    *(pytest.param("deep", TENSOR_CORES, "float16", dim, dict(vector=0), marks=slow) for dim in (16, 96, 128)),
    *(pytest.param("deep", TURING, "float16", dim, {}, marks=slow) for dim in (48, 128)),
    *(pytest.param("deep", one, "float16", 128, dict(vector=x), marks=slow) for one in (SMALLER, HOPPER) for x in (0, 1)),
    pytest.param("groups", TENSOR_CORES, "bfloat16", 32, {}, marks=slow),
    pytest.param("changed", *KINDS[0], 32, dict(bias="clipped"), marks=slow),
    pytest.param("changed", *KINDS[-1], 32, dict(bias="l1"), marks=slow),
    *(pytest.param("packed", *kind, 32, {}, marks=pytest.mark.kernels) for kind in (KINDS[0], KINDS[-1])),
    *(
        pytest.param(shape, *kind, head_dim, {}, marks=pytest.mark.kernels)
        for kind in (*KINDS, (HOPPER, "float32"), (HOPPER, "float16"))
        for shape in ("groups", "tall")
        for head_dim in (7, *HEAD_DIMS)
    ),
]


@pytest.mark.parametrize(("shape", "capability", "dtype", "head_dim", "options"), CHECKED)
def test_every_access_is_checked(shape, capability, dtype, head_dim, options):
    fields = {"batch": 1, "heads": 2, "bias": "none", **PATTERNS[shape], **options}
    macros = {name: fields.pop(name) for name in ("arch", "vector") if name in fields}
    case = Case(feature="races", variant=shape, head_dim=head_dim, dtype=dtype, **fields)
    result = judged(case, capability, Compiled("random", 1, workers=1, checked=True, **macros))
    assert result.verdict == "passed", result


@pytest.mark.parametrize(
    ("role", "capability", "waits", "loads"),
    [
        pytest.param("dquery", SMALLER, 5, 0.5, id="mma_dquery"),
        pytest.param("dkeyvalue", TENSOR_CORES, 7, None, id="mma_dkeyvalue"),
        pytest.param("dquery", TENSOR_CORES, 6, 0.25, id="mma_dquery_pairs"),
    ],
)
def test_threads_wait_and_load_no_more_often_than_they_must(role, capability, waits, loads):
    """Barriers: at the first tile, in each of 4 tiles for 8 times 32 columns, and so many beside these. Loads: fragments of keys
    and values for each product; where two warps have the same rows, one serves 32 rows, not 16."""
    sizes = dict(pattern=Pattern([256], [1]), seq=256, batch=1, heads=1, head_dim=128, dtype="float16")
    case = Case(feature="waits", variant="", **sizes)
    backend, tensors, numbers = OnHost(capability, Compiled(workers=1)), make_tensors(case), torch.zeros(1, 1, 256)
    backend.launcher.resident = lambda kernel, device: 1
    given = dict(zip(("query", "key", "value"), tensors.qkv, strict=True)) | dict(dout=tensors.dout, lse=numbers, delta=numbers)
    written = {name: torch.empty_like(tensors.query) for name in ("dquery", "dkey", "dvalue")}
    backend.launch_role(role, given | written, case.problem())
    launcher = backend.launcher
    assert isinstance(launcher, Compiled)
    assert launcher.barriers == 1 + 4 * (8 + waits)
    if loads:
        products, own = 3 * (256 // 16) * (256 // 8) * (128 // 16), 2 * (256 // 16) * (128 // 16)
        warps_of_a_row = 1 if capability == SMALLER else 2
        assert (launcher.matrices / 4 - own * warps_of_a_row) / products == loads


ROW_TERM = {"*row_term(": (3, "in the padding of the weights; once for 64 of the others, or once a tile")}
KNOWN = {
    "fp32_forward.cu": {
        "positions[mine + key_in_column(piece * SWEEP)]": (1, "one number of four that a thread prefetches"),
        "positions[1][key_in_column(r)] =": (1, "once a tile"),
    },
    "fp32_backward.cuh": ROW_TERM,
    "fp32_dquery.cu": ROW_TERM,
    "fp32_dkeyvalue.cu": ROW_TERM,
    "mma_forward.cu": {
        "total[f][h]": (3, "of one thread next to each other: once a tile, or where maxima rise"),
        "totals[f][h]": (3, "the same, once a tile"),
        "total[f][0] += added[f][0], total[f][1] += added[f][1]": (3, "joined to one access of 16 bytes by NVRTC"),
    },
    "mma_backward.cuh": {
        "pair[0] = factor * sum[m][n][2 * h], pair[1] =": (1, "joined to one access of 8 bytes by NVRTC"),
    },
}
"""A line's text by file, with the most turns that an instruction there takes beyond those it needs, and why."""


def excused(place: str, turns: float) -> str | None:
    name, number = re.findall(r"([\w.]+):(\d+)", place)[0]
    line = (KERNELS / name).read_text().splitlines()[int(number) - 1]
    return next((text for text, (most, _) in KNOWN.get(name, {}).items() if text in line and turns <= most), None)


USUAL = [(FP32, "float32"), (TENSOR_CORES, "bfloat16")]
"""With rows of 32 numbers: what is checked for races is compiled for them too."""

AT_LENGTH = [
    pytest.param(*kind, head_dim, marks=pytest.mark.kernels)
    for kind in (*USUAL, (FP32, "float16"), (TURING, "float16"), (HOPPER, "float16"))
    for head_dim in HEAD_DIMS
    if head_dim != 32 or kind not in USUAL
]


@pytest.mark.parametrize(("capability", "dtype", "head_dim"), [*((*kind, 32) for kind in USUAL), *AT_LENGTH])
def test_no_kernel_has_conflicts_that_are_not_known(capability, dtype, head_dim):
    launcher = HostLauncher(workers=1, checked=True)
    sizes = dict(pattern=Pattern([256], [1]), seq=256, batch=1, heads=1, head_dim=head_dim, dtype=dtype)
    both_passes(Case(feature="banks", variant="", is_causal=True, **sizes), capability, launcher)
    found = {f"{size} bytes at {where}": turns / n for (where, size), (n, turns) in launcher.turns.items() if turns}
    assert {place: turns for place, turns in found.items() if not excused(place, turns)} == {}
    assert found, "what is known is seen"
    assert launcher.conflicts == 0, "matrices for tensor cores"
    assert len(launcher.turns) > 50
    assert (launcher.matrices > 0) == (capability != FP32)


def test_what_is_known_is_there():
    for name, lines in KNOWN.items():
        source = (KERNELS / name).read_text()
        assert [text for text in lines if text not in source] == []
