"""All mutants, spread over all packages."""

from __future__ import annotations

from mutants.backends import BACKENDS
from mutants.comm import COMM
from mutants.core import CORE
from mutants.tools import TOOLS

MUTANTS = (*CORE, *BACKENDS, *COMM, *TOOLS)
