"""The forms of the biases that cases of the problem list name."""

from __future__ import annotations

from dilkit.bias.form import BiasForm

BIAS_FORMS = {
    "alibi": BiasForm(),
    "euclidean": BiasForm(dims=2, metric="euclidean", placed=True),
    "l1": BiasForm(dims=3, metric="l1", placed=True),
    "max": BiasForm(dims=2, metric="max", placed=True),
    "in a line": BiasForm(dims=1, metric="euclidean", placed=True),
    "clipped": BiasForm(sizes=(15,)),
    "buckets": BiasForm(sizes=(2 * 20 + 1,)),
    "grid": BiasForm(dims=2, sizes=(5, 7), placed=True),
    "grid in space": BiasForm(dims=3, sizes=(3, 3, 5), placed=True),
}
