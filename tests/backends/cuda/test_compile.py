"""The compiler of CUDA kernels and its cache on disk."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilkit import environment
from dilkit.backends.cuda import compile as cuda_compile, report as cuda_report
from dilkit.backends.cuda.table import CudaKernel

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")

KERNEL = CudaKernel("small.cu", "small", threads=32, blocks=1, tile_rows=4, defines=(("HEAD_DIM", 16),))
CAPABILITY = (8, 0)
"""Both NVRTC 12 and 13 compile for it."""
FILES = {
    "small.cu": '#include "size.cuh"\n'
    'extern "C" __global__ void small(float *x) { __shared__ float s[SIZE]; s[threadIdx.x] = *x; __syncthreads();'
    " x[threadIdx.x] = s[HEAD_DIM - threadIdx.x]; }\n",
    "size.cuh": "#define SIZE 64\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("DILKIT_CUDA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_compile, "_texts", lambda: FILES)
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch) -> list[Any]:
    found, true = [], cuda_compile.compiled

    def compiled(*arguments):
        found.append(arguments)
        return true(*arguments)

    monkeypatch.setattr(cuda_compile, "compiled", compiled)
    return found


def test_code_is_compiled_once_and_again_where_its_file_is_damaged(folder, compilations):
    code = cuda_compile.code_of(KERNEL, CAPABILITY)
    assert code[:4] == b"\x7fELF"
    assert cuda_compile.code_of(KERNEL, CAPABILITY) == code
    assert len(compilations) == 1
    (place,) = folder.iterdir()
    good = place.read_bytes()
    place.write_bytes(good[:-1])
    assert cuda_compile.code_of(KERNEL, CAPABILITY) == code
    assert len(compilations) == 2, "a damaged file is compiled anew"
    assert place.read_bytes() == good


@pytest.mark.parametrize(
    ("fields", "capability"),
    [
        ({}, (9, 0)),
        (dict(threads=64), CAPABILITY),
        (dict(blocks=2), CAPABILITY),
        (dict(tile_rows=8), CAPABILITY),
        (dict(defines=(("HEAD_DIM", 32),)), CAPABILITY),
    ],
)
def test_other_options_are_other_code(folder, fields, capability):
    cuda_compile.code_of(KERNEL, CAPABILITY)
    cuda_compile.code_of(replace(KERNEL, **fields), capability)
    assert len(list(folder.iterdir())) == 2


def test_other_sources_are_other_code(folder, monkeypatch):
    cuda_compile.code_of(KERNEL, CAPABILITY)
    for name in FILES:
        monkeypatch.setattr(cuda_compile, "_texts", lambda name=name: {**FILES, name: FILES[name] + "\n"})
        cuda_compile.code_of(KERNEL, CAPABILITY)
    assert len(list(folder.iterdir())) == 3


def test_another_compiler_is_other_code(folder, monkeypatch):
    """A newer patch level, of which getVersion says nothing."""
    true = cuda_compile.load_nvrtc()

    class Newer:
        def __getattr__(self, name):
            return getattr(true, name)

        def getPTX(self, program):
            text = true.getPTX(program)
            return re.sub(rb", V(\d+\.\d+)\.\d+", rb", V\1.99", text)

    cuda_compile.code_of(KERNEL, CAPABILITY)
    (major, minor), newer = cuda_compile.compiler_version(), Newer()
    monkeypatch.setattr(cuda_compile, "load_nvrtc", lambda: newer)
    assert cuda_compile.compiler_build().startswith(f"{major}.{minor}.99 ")
    cuda_compile.code_of(KERNEL, CAPABILITY)
    assert len(list(folder.iterdir())) == 2


def test_no_damaged_code_is_read(tmp_path):
    """A kept file with any changed byte, or of another length, is not loaded."""
    place = tmp_path / "kept" / "a.cubin"
    cuda_compile._keep(place, b"machine code")
    good = place.read_bytes()
    flipped = [good[:i] + bytes([good[i] ^ 64]) + good[i + 1 :] for i in range(len(good))]
    for damaged in (*flipped, *(good[:i] for i in range(len(good)))):
        place.write_bytes(damaged)
        assert cuda_compile._read(place) is None
    place.write_bytes(good)
    assert cuda_compile._read(place) == b"machine code"


@pytest.mark.parametrize("obstacle", ["a file in its place", "no folder can be made", "no file can be written"])
def test_without_a_usable_folder_it_is_compiled_each_time(folder, compilations, monkeypatch, obstacle):
    def refuse(*_, **__):
        raise PermissionError(obstacle)

    if obstacle == "a file in its place":
        folder.write_text("no folder")
    elif obstacle == "no folder can be made":
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        monkeypatch.setattr("dilkit.files.secrets.token_hex", refuse)
    for count in (1, 2):
        assert cuda_compile.code_of(KERNEL, CAPABILITY)[:4] == b"\x7fELF"
        assert len(compilations) == count


def test_a_file_that_cannot_be_put_in_place_leaves_nothing(folder, monkeypatch):
    def refuse(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    assert cuda_compile.code_of(KERNEL, CAPABILITY)
    assert list(folder.iterdir()) == []


def test_code_that_another_user_may_have_written_is_not_run(folder, compilations):
    code = cuda_compile.code_of(KERNEL, CAPABILITY)
    (kept,) = folder.iterdir()
    for path, mode in ((folder, 0o777), (folder, 0o770), (kept, 0o666)):
        before = path.stat().st_mode
        path.chmod(mode)
        cuda_compile._warn_that_none_are_kept.cache_clear()
        with pytest.warns(UserWarning, match=f"{path} can be written by others.*DILKIT_CUDA_CACHE"):
            assert cuda_compile.code_of(KERNEL, CAPABILITY) == code
        path.chmod(before)
    assert len(compilations) == 4
    assert cuda_compile.code_of(KERNEL, CAPABILITY) == code
    assert len(compilations) == 4


def test_a_source_that_is_wrong_raises_with_the_log(folder, monkeypatch):
    monkeypatch.setattr(cuda_compile, "_texts", lambda: {"small.cu": "nonsense;"})
    with pytest.raises(RuntimeError, match=r"(?s)small\.cu with --gpu-architecture=sm_80.*-DTHREADS=32.*nonsense"):
        cuda_compile.code_of(KERNEL, CAPABILITY)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("capability", "expected"), [((6, 1), "sm_61"), ((8, 7), "sm_86"), ((9, 0), "sm_90"), ((12, 1), "sm_120")]
)
def test_the_architecture_is_the_newest_that_runs_there(capability, expected):
    assert cuda_compile.architecture(capability, [52, 60, 61, 70, 80, 86, 89, 90, 100, 120]) == expected


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")])
def test_its_own_architecture_runs_nowhere_else(capability, expected):
    known = [80, 90, 100, 120]
    assert cuda_compile.architecture(capability, known, own_only=True) == expected
    for other in ((8, 0), (capability[0], 5)):
        with pytest.raises(RuntimeError, match=r"none of which runs on sm_\d+a: install"):
            cuda_compile.architecture(other, known, own_only=True)


@pytest.mark.parametrize("capability", [(6, 1), (13, 0)])
def test_a_device_that_the_compiler_does_not_know_is_refused(capability):
    with pytest.raises(RuntimeError, match=r"none of which runs on sm_(61|130): install"):
        cuda_compile.architecture(capability, [75, 80, 90, 100, 120])


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr("cupy.cuda.nvrtc.getVersion", lambda: 1 / 0)
    with pytest.raises(RuntimeError, match=r"pip install 'dilkit\[cuda12\]'"):
        cuda_compile.code_of(KERNEL, CAPABILITY)


def test_the_report_is_read(folder, monkeypatch):
    used = cuda_report.usages(cuda_compile.compiled("small.cu", cuda_compile.options_of(KERNEL, CAPABILITY))[1])["small"]
    assert (used.architecture, used.shared, used.spills, used.stack) == ("sm_80", 256, 0, 0)
    assert 1 < used.registers < 64
    body = "float a[200]; for (int i = 0; i < 200; i++) a[i] = x[i]; for (int i = 0; i < 200; i++) x[i] = a[(i * 7) % 200];"
    text = f'extern "C" __global__ void __launch_bounds__(1024, 2) large(float *x) {{ {body} x[0] = a[(int)x[3]]; }}'
    monkeypatch.setattr(cuda_compile, "_texts", lambda: {"small.cu": text})
    used = cuda_report.usages(cuda_compile.compiled("small.cu", cuda_compile.options_of(KERNEL, CAPABILITY))[1])["large"]
    assert used.stack >= 800
    log = (
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\nptxas info    : Function properties for one\n"
        "    8 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    assert cuda_report.usages(log)["one"] == cuda_report.Usage("one", "sm_90", 255, 8, 36, 0)
    with pytest.raises(ValueError, match="no kernel is reported"):
        cuda_report.usages("nothing")


def test_the_folder_is_that_of_the_variable_or_one_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.setenv("DILKIT_CUDA_CACHE", f" {tmp_path} ")
    assert environment.cuda_cache() == tmp_path
    monkeypatch.delenv("DILKIT_CUDA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cuda_cache() == tmp_path / "dilkit" / "cuda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.cuda_cache() == tmp_path / ".cache" / "dilkit" / "cuda"
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError()))
    assert environment.cuda_cache() is None
    monkeypatch.setenv("DILKIT_CUDA_CACHE", "~nobody/cache")
    with pytest.raises(ValueError, match=r"DILKIT_CUDA_CACHE='~nobody/cache'"):
        environment.cuda_cache()
