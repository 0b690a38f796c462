"""Malformed limits and backends."""

from __future__ import annotations

from typing import Any

from helpers.malformed.case import Case

from dilkit import Backend, Limits, list_backends, register_backend, unregister_backend


def limits(**options: Any) -> Any:
    return lambda: Limits(**options)


def registered(**attributes: Any) -> Any:
    facts = {"name": "odd", "forward": lambda *args: None, **attributes}
    return lambda: register_backend(type("Odd", (Backend,), facts)())


BACKENDS = {
    "devices are one name": Case(limits(devices="cpu"), TypeError, ("devices='cpu'", "str", "set of names")),
    "dtypes of torch": Case(limits(dtypes={1.5}), TypeError, ("dtypes={1.5}", "set of names")),
    "dtypes are None": Case(limits(dtypes=None), TypeError, ("dtypes=None", "set of names")),
    "head_dim is a text": Case(limits(max_head_dim="128"), TypeError, ("max_head_dim='128'", "integer")),
    "head_dim below 0": Case(limits(max_head_dim=-1), ValueError, ("max_head_dim=-1", "at least 0")),
    "a multiple of 0": Case(limits(head_dim_multiple=0), ValueError, ("head_dim_multiple=0", "at least 1")),
    "capability is a number": Case(limits(min_capability=8.0), TypeError, ("min_capability=8.0", "(8, 0)")),
    "capability is a text": Case(limits(max_capability="sm_80"), TypeError, ("max_capability='sm_80'", "(8, 0)")),
    "causality is a text": Case(limits(causal="yes"), TypeError, ("causal='yes'", "True or False")),
    "name with a comma": Case(registered(name="x,y"), TypeError, ("backend=", "'x,y'", "comma")),
    "no name": Case(registered(name=""), TypeError, ("backend=", "no name")),
    "limits are a dict": Case(registered(limits={}), TypeError, ("backend=", "limits", "Limits")),
    "requires is a text": Case(registered(requires="numpy"), TypeError, ("backend=", "requires 'numpy'", "tuple")),
    "priority is a text": Case(registered(priority="high"), TypeError, ("backend=", "priority 'high'", "integer")),
    "the name of a declared one": Case(registered(name="native"), ValueError, ("'native'", "Native", "replace=True")),
    "nothing": Case(lambda: register_backend(None), TypeError, ("backend=None", "instance")),
    "no one of that name": Case(lambda: unregister_backend(None), ValueError, ("name=None", "registered")),
    "list of a name": Case(lambda: list_backends("sdpa"), TypeError, ("list_backends()", "1 was given")),
}
