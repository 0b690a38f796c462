"""Environment variables are read at each use."""

from __future__ import annotations

import pytest

from dilkit import environment


@pytest.mark.parametrize("has_raw_names", [True, False])
def test_a_change_takes_effect_at_once(monkeypatch: pytest.MonkeyPatch, has_raw_names: bool) -> None:
    if not has_raw_names:  # as in a Python whose `os.environ` is made differently
        monkeypatch.setattr(environment, "_RAW", None)
    monkeypatch.delenv("DILKIT_BACKEND", raising=False)
    assert environment.backend_names() == ()
    monkeypatch.setenv("DILKIT_BACKEND", "native, sdpa")
    assert environment.backend_names() == ("native", "sdpa")
    monkeypatch.delenv("DILKIT_BACKEND")
    assert environment.backend_names() == ()
