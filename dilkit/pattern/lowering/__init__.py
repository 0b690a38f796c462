"""The lowering of patterns: branches of any kind as a few forms, each with the heads that it serves."""

from dilkit.pattern.lowering.checks import forms_of
from dilkit.pattern.lowering.forms import FORMS, Band, CutGrid, Form, GivenBlocks, Global, Grid, Runs, Segments, Unlowered
from dilkit.pattern.lowering.lower import Forms, lower
from dilkit.pattern.lowering.tables import RunTable

__all__ = ["FORMS", "Band", "CutGrid", "Form", "Forms", "GivenBlocks", "Global", "Grid", "RunTable", "Runs", "Segments"]
__all__ += ["Unlowered", "forms_of", "lower"]
