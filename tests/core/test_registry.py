"""The registry."""

import inspect
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

import dilkit
from dilkit import Backend, Limits, registry
from dilkit.registry import Broken, backends, list_backends, register_backend, unregister_backend

Declare = Callable[..., None]


class Fine(Backend):
    name = "fine"
    limits = Limits(devices=None)

    def forward(self, *args):
        raise NotImplementedError


def made(name="fine", /, **attributes):
    return type(name.title(), (Fine,), {"name": name, **attributes})


@pytest.fixture
def declare(monkeypatch):
    monkeypatch.setattr(registry, "_declared", None)
    monkeypatch.setattr(registry, "_registered", {})

    def declare(**things):
        points = []
        for name, thing in things.items():
            module = ModuleType(f"plugin_{name}")
            module.thing = thing
            monkeypatch.setitem(sys.modules, module.__name__, module)
            where = "thing" if not isinstance(thing, str) else thing
            points.append(EntryPoint(name, f"{module.__name__}:{where}", registry.GROUP))
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return declare


def raising(error):
    def construct():
        raise error

    return construct


@pytest.mark.parametrize(
    ("thing", "error"),
    [
        (raising(RuntimeError("no driver")), "RuntimeError: no driver"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        ("no_such_name", "AttributeError"),
        (object(), "TypeError: 'object' object is not callable"),
        (ModuleType("whole"), "it names a module; name the class in it, as plugin_plugin:"),
        (lambda: Fine, "it is a class; an instance is needed, as Fine()"),
        (dict, "a dict is not an instance of dilkit.backend.Backend"),
        (made("other"), "the entry point is called 'plugin' but the backend 'other'"),
        (made("plugin", name=""), "it has no name"),
        (made("plugin", name="a,b"), "has a comma, a semicolon, outer blanks"),
        (made("plugin", limits=property(lambda self: 1 / 0)), "ZeroDivisionError"),
        (made("plugin", forward=None), "its forward is no method"),
        (type("Half", (Backend,), {"name": "plugin"}), "TypeError: Can't instantiate abstract class Half"),
    ],
)
def test_a_broken_plugin_is_reported_and_hides_no_other(declare, thing, error):
    declare(plugin=thing, fine=made())
    known = backends()
    assert list(known) == ["fine", "plugin"]
    assert isinstance(known["fine"], Fine)
    broken = known["plugin"]
    assert error in broken.error
    assert broken.origin.startswith("plugin_plugin:")
    assert list_backends() == ("fine", "plugin")


def test_a_module_that_cannot_be_imported(declare, monkeypatch):
    points = [
        EntryPoint("absent", "dilkit_no_such_module:Backend", registry.GROUP),
        EntryPoint("odd", "not a reference", registry.GROUP),
    ]
    declare()
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    broken = backends()
    assert broken["absent"].error == "ModuleNotFoundError: No module named 'dilkit_no_such_module'"
    assert isinstance(broken["odd"], Broken)


def test_the_second_of_a_name_is_broken_and_the_first_stays(declare, monkeypatch):
    declare(fine=made(), late=made("late"), worse=raising(OSError("gone")))
    ours, late, worse = registry.entry_points(group=registry.GROUP)
    twins = [EntryPoint("fine", late.value, registry.GROUP), EntryPoint("fine", worse.value, registry.GROUP), ours]
    late.load().name = "fine"
    monkeypatch.setattr(registry, "entry_points", lambda group: twins)
    known = backends()
    assert isinstance(known["fine"], Fine)
    rest = [b for b in known.values() if isinstance(b, Broken)]
    assert all("the name 'fine' is already taken" in b.error for b in rest)
    assert "OSError: gone" in known[f"fine ({worse.value})"].error
    assert len(known) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_load_leaves_no_half_list(declare, error):
    interrupts = [error()]

    def construct():
        if interrupts:
            raise interrupts.pop()
        return made("slow")()

    declare(fine=made(), slow=construct)
    with pytest.raises(error):
        backends()
    assert list_backends() == ("fine", "slow")


def test_a_plugin_may_ask_for_the_list_while_it_is_loaded(declare):
    seen = []

    class Curious(Fine):
        name = "curious"

        def __init__(self):
            seen.append(list_backends())

    declare(acme=made("acme"), curious=Curious)
    assert list_backends() == ("acme", "curious")
    assert seen == [("acme",)]


def test_the_list_is_in_order_of_preference(declare):
    declare(b=made("b"), a=made("a"), best=made("best", priority=5), worst=made("worst", priority=-5), aa=raising(ValueError()))
    assert list_backends() == ("best", "a", "b", "worst", "aa")


def test_a_registered_backend_hides_the_declared_one_until_it_goes(declare):
    declare(fine=made())
    declared = backends()["fine"]
    newer, other = made()(), made("other")()
    register_backend(newer)
    register_backend(other)
    assert backends() == {"fine": newer, "other": other}
    rewritten = type("Rewritten", (Fine,), {})()
    with pytest.raises(ValueError, match=r"'fine' is that of .*\.Fine; give yours another name, or replace=True"):
        register_backend(rewritten)
    register_backend(rewritten, replace=True)
    assert backends()["fine"] is rewritten
    unregister_backend("fine")
    assert backends() == {"fine": declared, "other": other}
    with pytest.raises(ValueError, match="name='fine' was not registered in this process; registered: other"):
        unregister_backend("fine")


def test_what_is_returned_can_be_changed_without_harm():
    before = dilkit.list_backends()
    backends().clear()
    assert dilkit.list_backends() == before


def test_a_backend_cannot_write_to_the_terminal_by_its_texts():
    def loudly(self, problem):
        raise RuntimeError("\x1b[2J\x1b[31mred\rover")

    register_backend(made("loud", refusals=loudly)())
    try:
        text = str(dilkit.explain(dilkit.Problem(pattern=dilkit.Pattern([8], [1]), seq=64, heads=2, head_dim=8), "loud"))
    finally:
        unregister_backend("loud")
    assert r"RuntimeError: \x1b[2J\x1b[31mred over" in text
    with pytest.raises(TypeError, match="cannot be printed"):
        register_backend(made("\x1b[31m")())


def test_a_first_call_on_a_stack_that_is_nearly_full(declare, monkeypatch):
    """It fails, or finds all backends; it does not leave them broken for want of frames."""

    def hungry(frames=120):
        return hungry(frames - 1) if frames else Fine()

    def deep(frames):
        return deep(frames - 1) if frames else list_backends()

    declare(fine=hungry)
    depth = sys.getrecursionlimit() - len(inspect.stack(0))
    found = set()
    for room in range(10, 400, 10):
        monkeypatch.setattr(registry, "_declared", None)
        try:
            found.add(deep(depth - room))
        except RecursionError:
            assert list_backends() == ("fine",)
            found.add(())
        assert isinstance(backends()["fine"], Backend)
    assert found == {(), ("fine",)}
