"""Environment variables."""

import pytest

from dilkit import Pattern, Problem, environment
from dilkit.selector import requested_backends, select


@pytest.mark.parametrize("has_raw_names", [True, False])
def test_a_change_takes_effect_at_once(monkeypatch, has_raw_names):
    if not has_raw_names:  # as in a Python whose `os.environ` is made differently
        monkeypatch.setattr(environment, "_RAW", None)
    monkeypatch.delenv("DILKIT_BACKEND", raising=False)
    assert environment.backend_names() == ()
    monkeypatch.setenv("DILKIT_BACKEND", "native, sdpa")
    assert environment.backend_names() == ("native", "sdpa")
    monkeypatch.delenv("DILKIT_BACKEND")
    assert environment.backend_names() == ()


NONSENSE = {
    environment.BACKEND: "abacus",
    environment.CACHE_BYTES: "lots",
    environment.CPU_ISA: "mmx",
    environment.CUDA_CACHE: "~nobody9/cache",
    environment.GPU_PROOF: "perhaps",
    environment.TUNED: "~nobody9/tuned.json",
}


@pytest.mark.parametrize("variable", environment.VARIABLES, ids=lambda variable: variable.name)
def test_nonsense_raises_where_a_backend_is_chosen(variable, monkeypatch):
    monkeypatch.setenv(variable.name, NONSENSE[variable])
    problem = Problem(pattern=Pattern([len(variable.name)], [1]), seq=8, heads=1, head_dim=8)
    with pytest.raises(ValueError, match=f"{variable.name}='{NONSENSE[variable]}'"):
        select(problem, requested_backends())


def test_a_misspelt_name_is_said_once(monkeypatch):
    monkeypatch.setattr(environment, "_warned", set())
    monkeypatch.setenv("DILKIT_CACHE_BYTE", "0")
    monkeypatch.setenv("DILKIT_PLUGIN_OF_MINE", "0")  # nobody's misspelling
    with pytest.warns(UserWarning, match=r"DILKIT_CACHE_BYTE is set.*did you mean DILKIT_CACHE_BYTES\?"):
        environment.check()
    environment.check()
