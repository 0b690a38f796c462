"""Forms of biases in the problem list, by name."""

from __future__ import annotations

from dilkit.bias.form import BiasForm

BIAS_FORMS = {
    "alibi": BiasForm(),
    "euclidean": BiasForm(dims=2, metric="euclidean", placed=True),
    "l1": BiasForm(dims=3, metric="l1", placed=True),
    "max": BiasForm(dims=2, metric="max", placed=True),
    "euclidean in space": BiasForm(dims=3, metric="euclidean", placed=True),
    "l1 in a plane": BiasForm(dims=2, metric="l1", placed=True),
    "max in space": BiasForm(dims=3, metric="max", placed=True),
    "in a line": BiasForm(dims=1, metric="euclidean", placed=True),
    "neutral": BiasForm(dims=2, metric="euclidean", placed=True, neutral=True),
    "neutral in space": BiasForm(dims=3, metric="max", placed=True, neutral=True),
    "clipped": BiasForm(sizes=(15,)),
    "buckets": BiasForm(sizes=(2 * 20 + 1,)),
    "grid in a line": BiasForm(sizes=(9,), placed=True),
    "grid": BiasForm(dims=2, sizes=(5, 7), placed=True),
    "grid in space": BiasForm(dims=3, sizes=(3, 3, 5), placed=True),
    "axes": BiasForm(dims=2, sizes=(5, 7), placed=True, by_axis=True),
    "axes in space": BiasForm(dims=3, sizes=(5, 3, 7), placed=True, by_axis=True),
    "rows": BiasForm(sizes=(15,), by_query=True),
    "rows in a line": BiasForm(sizes=(9,), placed=True, by_query=True),
    "rows on a grid": BiasForm(dims=2, sizes=(5, 11), placed=True, by_axis=True, by_query=True),
    "rows in space": BiasForm(dims=3, sizes=(5, 3, 7), placed=True, by_axis=True, by_query=True),
}

CACHED_BIASES = [name for name, form in BIAS_FORMS.items() if not form.by_query]
"""Names of forms that caches take."""


def form_like(form: BiasForm) -> str:
    """Return the name in `BIAS_FORMS` of a form that kernels compute with the same code as `form`.

    >>> from dilkit.bias.form import BiasForm
    >>> from dilkit.testing.bias_forms import form_like
    >>> form_like(BiasForm(dims=2, sizes=(27, 27), placed=True, learned=True))
    'grid'
    """
    return next(name for name, known in BIAS_FORMS.items() if known.code == form.code)
