"""The package map and the Cython extensions; everything else is in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup

PACKAGES = {"dilkit": "dilkit", "dilkit.backends": "backends", "dilkit.comm": "comm", "dilkit.tools": "tools"}
EXTENSIONS = [Extension("dilkit._plan", ["dilkit/_plan.pyx"], extra_compile_args=["-O3"])]

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    ext_modules=cythonize(EXTENSIONS, language_level=3),
)
