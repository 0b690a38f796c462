"""The package map and the extensions; everything else is in pyproject.toml."""

import platform
import tempfile
from pathlib import Path
from unittest import mock

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGES = {"dilkit": "dilkit", "dilkit.backends": "backends", "dilkit.comm": "comm", "dilkit.tools": "tools"}
X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"]
INSTRUCTION_SETS = {"avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16"]} if X86 else {}
"""The flags that the files <part>_<name>.c alone are compiled with: which of them runs is decided where it runs."""

NATIVE = Extension(
    "dilkit.backends._native",
    ["backends/_native.pyx", "backends/native_threads.c", "backends/native_generic.c"],
    depends=[str(path) for path in sorted(Path("backends").glob("native*.[ch]"))],
    include_dirs=["backends"],
    extra_compile_args=["-O3", "-pthread"],
    extra_link_args=["-pthread", "-ldl"],
)
POINTS = Extension(
    "dilkit._points",
    ["dilkit/_points.pyx", "dilkit/points_generic.c"],
    depends=[str(path) for path in sorted(Path("dilkit").glob("points*.[ch]"))],
    include_dirs=["dilkit"],
    extra_compile_args=["-O3"],
)
DISPATCHED = {NATIVE.name: "backends/native", POINTS.name: "dilkit/points"}
"""The extensions that choose an instruction set where they run: where their C files' names begin."""


def curves(name, *sources):
    """An extension of the core with C files beside it, which start threads."""
    files = [f"dilkit/{source}" for source in (f"{name}.pyx", *sources)]
    headers = sorted(str(path) for path in Path("dilkit").glob(f"{name.removeprefix('_')}*.h"))
    flags = dict(extra_compile_args=["-O3", "-pthread"], extra_link_args=["-pthread"])
    return Extension(f"dilkit.{name}", files, depends=headers, include_dirs=["dilkit"], **flags)


EXTENSIONS = [
    *(
        Extension(f"dilkit.{name}", [f"dilkit/{name}.pyx"], extra_compile_args=["-O3"])
        for name in ("_locality", "_plan", "_tiles")
    ),
    curves("_curves", "curves_hilbert.c", "curves_boxes.c", "curves_write.c"),
    curves("_generalised", "generalised.c"),
    Extension("dilkit.comm._rows", ["comm/_rows.pyx"], extra_compile_args=["-O3"]),
    NATIVE,
    POINTS,
]


class BuildExtensions(build_ext):
    """Compiles what is dispatched once for each instruction set that the compiler knows, each file with its own flags."""

    def build_extension(self, ext):
        if ext.name not in DISPATCHED:
            return super().build_extension(ext)
        part = Path(DISPATCHED[ext.name])
        sets = {name: flags for name, flags in INSTRUCTION_SETS.items() if Path(f"{part}_{name}.c").exists()}
        known = {f"{part}_{name}.c": flags for name, flags in sets.items() if self.understands(flags)}
        ext.sources += known
        ext.define_macros += [(Path(source).stem.upper(), None) for source in known]
        compile_one = self.compiler._compile

        def with_own_flags(target, source, suffix, arguments, flags, *rest):
            compile_one(target, source, suffix, arguments, [*flags, *known.get(source, [])], *rest)

        with mock.patch.object(self.compiler, "_compile", with_own_flags):
            return super().build_extension(ext)

    def understands(self, flags):
        """Whether the compiler takes `flags`: one from before an instruction set leaves that out."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "empty.c")
            source.write_text("int nothing;\n")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
            except CompileError:
                return False
        return True


setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    ext_modules=cythonize(EXTENSIONS, language_level=3),
    cmdclass={"build_ext": BuildExtensions},
)
