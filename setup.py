"""The package map and the extensions; everything else is in pyproject.toml."""

import platform
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGES = {"dilkit": "dilkit", "dilkit.backends": "backends", "dilkit.comm": "comm", "dilkit.tools": "tools"}
X86 = platform.machine().lower() in ("x86_64", "amd64")
INSTRUCTION_SETS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"],
}
"""The flags that the file native_<name>.c alone is compiled with: which of them runs is decided where it runs."""

KERNELS = ["generic", *(INSTRUCTION_SETS if X86 else ())]
EXTENSIONS = [
    Extension("dilkit._plan", ["dilkit/_plan.pyx"], extra_compile_args=["-O3"]),
    Extension(
        "dilkit.backends._native",
        ["backends/_native.pyx", "backends/native_threads.c", *(f"backends/native_{name}.c" for name in KERNELS)],
        depends=[str(path) for path in sorted(Path("backends").glob("native*.h"))],
        include_dirs=["backends"],
        define_macros=[("NATIVE_X86", "1")] if X86 else [],
        extra_compile_args=["-O3", "-pthread"],
        extra_link_args=["-pthread"],
    ),
]


class BuildExtensions(build_ext):
    """Compiles each source with its own flags beside those of its extension."""

    def build_extensions(self):
        compile_one = self.compiler._compile

        def with_own_flags(target, source, suffix, arguments, flags, *rest):
            own = INSTRUCTION_SETS.get(Path(source).stem.removeprefix("native_"), [])
            compile_one(target, source, suffix, arguments, [*flags, *own], *rest)

        self.compiler._compile = with_own_flags
        super().build_extensions()


setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    ext_modules=cythonize(EXTENSIONS, language_level=3),
    cmdclass={"build_ext": BuildExtensions},
)
