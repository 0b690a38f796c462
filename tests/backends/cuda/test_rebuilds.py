"""Which kernels `make kernels` compiles again: those that are made of something else than what its report is of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dilkit.tools.bench.kernels import cases, document, record, sources
from dilkit.tools.results.file import read_result

pytest.importorskip("cupy", reason="cupy is not installed: make kernels")


def test_a_digest_is_of_the_code_of_a_file_and_of_what_that_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SOURCES", tmp_path)

    def digest(file: str, header: str, *options: str) -> str:
        (tmp_path / "a.cu").write_text(f'#include "b.cuh"\n{file}')
        (tmp_path / "b.cuh").write_text(header)
        sources._digest_of_file.cache_clear()
        return sources.digest("a.cu", options)

    try:
        first = digest("int x; /* before */", "int y;", "-DROWS=64")
        assert digest("/* after\n */ int\n x;", "int y; /* new */", "-DROWS=64") == first
        others = digest("int z;", "int y;", "-DROWS=64"), digest("int x;", "int z;", "-DROWS=64"), digest("int x;", "int y;")
        assert len({first, *others}) == 4
    finally:
        sources._digest_of_file.cache_clear()


class Compiler:
    """In the place of NVRTC: notes what it is asked for, and is stopped when it has compiled so many builds."""

    def __init__(self, stops: int = -1) -> None:
        self.stops, self.asked = stops, list[cases.Build]()

    def __call__(self, asked: list[cases.Build], jobs: int) -> Iterator[record.KernelUse]:
        for build in asked:
            if len(self.asked) == self.stops:
                raise KeyboardInterrupt
            self.asked.append(build)
            yield from (record.KernelUse(*key[:5], build.source, 128, 2, key[5], 0, 0, 99, 0, 0) for key in build.keys)


def test_what_is_known_is_compiled_again_where_its_source_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kernels.json"

    def compiled_by(compiler: Compiler, *arguments: str) -> record.KernelsResult:
        monkeypatch.setattr(cases, "_compiled", compiler)
        assert cases.main(["--quick", "--out", str(file), *arguments]) == 0
        return read_result(file, record.KernelsResult)

    begun = compiled_by(Compiler(stops=3))
    assert (len(begun.rows), begun.older) == (3, 0)
    every = compiled_by(rest := Compiler())
    quick = cases.builds(head_dims=[64], forms=["plain"]) + cases.step_builds(head_dims=[64])
    assert len(every.rows) == len(rest.asked) + 3 == len(quick)
    assert compiled_by(nothing := Compiler()).rows == every.rows
    assert nothing.asked == []

    changed = sources._digest_of_file
    monkeypatch.setattr(sources, "_digest_of_file", lambda name: changed(name) + "x" * (name == "row_dots.cu"))
    some = compiled_by(only := Compiler(), "--only", "sm_80")
    assert {build.kernel.source for build in only.asked} == {"row_dots.cu"}
    assert {build.capability for build in only.asked} == {(8, 0)}
    said = f"NVRTC {some.nvrtc}, {some.older} of them from sources that have changed since: none spills"
    assert said in document.sentence(some)
    assert some.older == sum(kernel.name == "row_dots" and kernel.architecture != "sm_80" for kernel in some.kernels()) > 0
    monkeypatch.setattr(cases.cuda_compile, "compiler_version", lambda: (99, 0))
    assert len(compiled_by(Compiler(stops=1)).rows) == 1, "of another compiler nothing is known"
