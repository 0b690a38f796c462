"""The packages and the extensions, found by walking the tree; everything else is in pyproject.toml.

A folder with an `__init__.py` is a package. A `.pyx` is an extension of the package that it lies in. The C files of an
extension are those in its folder of `C_FOLDERS`; one that is named after an instruction set is compiled with that set's flags.
"""

import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

ROOTS = {"dilkit": "dilkit", "dilkit.backends": "backends", "dilkit.comm": "comm", "dilkit.tools": "tools"}
"""The top-level folders, each with the name that it is installed under."""
IN_CHECKOUTS_ONLY = (
    *("tools/bench/suites/", "tools/bench/workloads/", "tools/bench/configuration", "tools/site/"),
    *("tools/demo/image", "tools/demo/llama", "tools/demo/ranks"),
)
"""Beginnings of paths that no wheel has: suites of measurements, demos beside the first, what writes the pages."""
SUITES = "tools/bench/suites/__init__.py"
"""File that wheels have all the same: `dilkit bench --help` names the suites."""
C_FOLDERS = {
    "backends/native/_native.pyx": "backends/native/kernels",
    "dilkit/orders/_curves.pyx": "dilkit/orders/c/curves",
    "dilkit/orders/_points.pyx": "dilkit/orders/c/points",
}
WINDOWS = sys.platform == "win32"
"""True without POSIX threads: extensions with C files are left out, and refused with a reason when they are asked for."""
X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"]
AVX512BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*AVX512BF16, "-mamx-tile", "-mamx-bf16"]
INSTRUCTION_SETS = {"avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512bf16": AVX512BF16, "amx": AMX}
"""The flags that the C files of these names are compiled with: which of them runs is decided where it runs."""

STABLE_ABI = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
"""One build serves every Python from 3.11 on, the first whose stable ABI has buffers; 3.10 and free-threaded ones have their own.
Measured, interleaved: a call on 16 tokens (36 microseconds) and its gradients take what they took; a hit in the cache of plans
takes 0.09 instead of 0.05 microseconds, a small order 0.66 instead of 0.53."""


def is_installed(path):
    """False for a Python file that checkouts alone have."""
    return path.as_posix() == SUITES or not path.as_posix().startswith(IN_CHECKOUTS_ONLY)


def packages():
    """Every package that is installed by its name there, with its folder."""
    found = {}
    for name, folder in ROOTS.items():
        for path in sorted(Path(folder).rglob("__init__.py")):
            if is_installed(path):
                found[".".join([name, *path.parent.parts[1:]])] = path.parent.as_posix()
    return found


def extensions():
    """Every `.pyx` as an extension, with its C files but those for an instruction set, which `BuildExtensions` adds."""
    names = {folder: name for name, folder in packages().items()}
    for pyx in sorted(path for folder in ROOTS.values() for path in Path(folder).rglob("*.pyx")):
        name = f"{names[pyx.parent.as_posix()]}.{pyx.stem}"
        folder = Path(C_FOLDERS.get(pyx.as_posix(), "none"))
        if WINDOWS and folder.exists():
            continue
        sources = [path for path in sorted(folder.glob("*.c")) if path.stem not in INSTRUCTION_SETS]
        threads = dict(extra_link_args=["-pthread", "-ldl"], include_dirs=[str(folder)]) if sources else {}
        yield Extension(
            name,
            [str(path) for path in (pyx, *sources)],
            depends=[str(path) for path in sorted(folder.rglob("*.[ch]"))],
            extra_compile_args=["-O3", "-pthread"] if sources else [] if WINDOWS else ["-O3"],
            define_macros=[("Py_LIMITED_API", "0x030b0000")] if STABLE_ABI else [],
            py_limited_api=STABLE_ABI,
            **threads,
        )


class BuildModules(build_py):
    """Leaves out modules that checkouts alone have."""

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if is_installed(Path(module[2]))]


class BuildExtensions(build_ext):
    """Compiles what is dispatched once for each instruction set that the compiler knows, each file with its own flags."""

    def finalize_options(self):
        """Build as many extensions at a time as there are processors: together they take a minute on one."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext):
        dispatched = [path for path in map(Path, ext.depends) if X86 and path.suffix == ".c" and path.stem in INSTRUCTION_SETS]
        for path in filter(lambda path: self.understands(INSTRUCTION_SETS[path.stem]), dispatched):
            ext.define_macros.append((f"HAVE_{path.stem.upper()}", None))
            ext.extra_objects += self.compiler.compile(
                [str(path)],
                output_dir=self.build_temp,
                include_dirs=ext.include_dirs,
                debug=self.debug,
                extra_postargs=[*ext.extra_compile_args, *INSTRUCTION_SETS[path.stem]],
                depends=ext.depends,
            )
        super().build_extension(ext)

    def copy_extensions_to_source(self):
        """An extension from before the stable ABI would be taken before the one built now."""
        super().copy_extensions_to_source()
        for built in (Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions if ext.py_limited_api):
            built.with_name(built.name.partition(".")[0] + sysconfig.get_config_var("EXT_SUFFIX")).unlink(missing_ok=True)

    def understands(self, flags):
        """True if the compiler takes `flags`: one from before an instruction set leaves that out."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "empty.c")
            source.write_text("int nothing;\n")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
            except CompileError:
                return False
        return True


setup(
    packages=list(packages()),
    package_dir=packages(),
    ext_modules=cythonize(list(extensions()), language_level=3, nthreads=0 if WINDOWS else os.cpu_count()),
    cmdclass={"build_ext": BuildExtensions, "build_py": BuildModules},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
