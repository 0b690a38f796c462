"""`python -m dilkit` is the `dilkit` command."""

from __future__ import annotations

import sys

from dilkit.tools.cli import main

sys.exit(main())
