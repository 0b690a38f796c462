"""The classes that are patched: the procedure as published, and those of checkouts."""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.torchscale_peer import loaded, unavailable


@pytest.fixture
def peer(request) -> Iterator[type[Any]]:
    """Return torchscale's class, by default a peer written from the published procedure."""
    name = getattr(request, "param", "published")
    if why := unavailable(name):
        pytest.skip(why)
    with loaded(name) as kind:
        yield kind
