"""`python -m dilkit` is the `dilkit` command."""

from __future__ import annotations

import importlib
import sys

# By name, because the core must not depend on the tools.
sys.exit(importlib.import_module("dilkit.tools.cli").main())
