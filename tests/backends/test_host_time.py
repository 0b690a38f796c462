"""The script that measures the host's part of a call."""

from host_time import measure


def test_every_pass_has_a_time():
    times = measure(repeats=1)
    assert set(times) == {f"{name} {which}" for name in ("sdpa", "cupy_raw") for which in ("forward", "backward")}
    assert all(value > 0 for value in times.values())
