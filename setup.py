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
"""The flags that the file native_<name>.c alone is compiled with: which of them runs is decided where it runs."""

NATIVE = Extension(
    "dilkit.backends._native",
    ["backends/_native.pyx", "backends/native_threads.c", "backends/native_generic.c"],
    depends=[str(path) for path in sorted(Path("backends").glob("native*.[ch]"))],
    include_dirs=["backends"],
    extra_compile_args=["-O3", "-pthread"],
    extra_link_args=["-pthread", "-ldl"],
)
EXTENSIONS = [
    Extension("dilkit._locality", ["dilkit/_locality.pyx"], extra_compile_args=["-O3"]),
    Extension("dilkit._plan", ["dilkit/_plan.pyx"], extra_compile_args=["-O3"]),
    Extension("dilkit._tiles", ["dilkit/_tiles.pyx"], extra_compile_args=["-O3"]),
    Extension(
        "dilkit._curves",
        ["dilkit/_curves.pyx", "dilkit/curves_hilbert.c", "dilkit/curves_boxes.c", "dilkit/curves_write.c"],
        depends=["dilkit/curves.h", "dilkit/curves_write.h", "dilkit/curves_kernels.h"],
        include_dirs=["dilkit"],
        extra_compile_args=["-O3", "-pthread"],
        extra_link_args=["-pthread"],
    ),
    Extension("dilkit.comm._rows", ["comm/_rows.pyx"], extra_compile_args=["-O3"]),
    Extension(
        "dilkit._generalised",
        ["dilkit/_generalised.pyx", "dilkit/generalised.c"],
        depends=["dilkit/generalised.h"],
        include_dirs=["dilkit"],
        extra_compile_args=["-O3", "-pthread"],
        extra_link_args=["-pthread"],
    ),
    NATIVE,
]


class BuildExtensions(build_ext):
    """Compiles the CPU kernel once for each instruction set that the compiler knows, each file with its own flags."""

    def build_extension(self, ext):
        if ext.name != NATIVE.name:
            return super().build_extension(ext)
        known = {name: flags for name, flags in INSTRUCTION_SETS.items() if self.understands(flags)}
        ext.sources += [f"backends/native_{name}.c" for name in known]
        ext.define_macros += [(f"NATIVE_{name.upper()}", None) for name in known]
        compile_one = self.compiler._compile

        def with_own_flags(target, source, suffix, arguments, flags, *rest):
            own = known.get(Path(source).stem.removeprefix("native_"), [])
            compile_one(target, source, suffix, arguments, [*flags, *own], *rest)

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
