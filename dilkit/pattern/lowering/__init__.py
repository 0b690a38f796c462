"""The lowering of patterns: branches of any kind as a few forms, each with the heads that it serves."""

from dilkit.pattern.lowering.checks import forms_of
from dilkit.pattern.lowering.forms import (
    FORMS,
    GIVEN_FORMS,
    Band,
    CutGrid,
    Form,
    Given,
    GivenBlocks,
    GivenIntervals,
    Global,
    Grid,
    Runs,
    Segments,
    Unlowered,
)
from dilkit.pattern.lowering.lower import Forms, lower
from dilkit.pattern.lowering.tables import RunTable

__all__ = ["FORMS", "GIVEN_FORMS", "Band", "CutGrid", "Form", "Forms", "Given", "GivenBlocks", "GivenIntervals", "Global", "Grid"]
__all__ += ["RunTable", "Runs", "Segments", "Unlowered", "forms_of", "lower"]
