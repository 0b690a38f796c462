"""macOS and Windows."""

import runpy
import sys
from unittest import mock

import pytest
import torch
from helpers.command_line import in_subprocess
from helpers.project import ROOT, ROOTS

from dilkit import Device, Pattern, Problem, dilated_attention, explain, plan
from dilkit.selector import select

pytestmark = pytest.mark.surroundings

HIDE = """
import ctypes, importlib, multiprocessing, os, pathlib, pkgutil, signal, subprocess, sys, sysconfig, tempfile
import numpy, torch, torch.distributed, torch.utils.checkpoint, tqdm

MODULES, OS, SIGNALS, EXTENSIONS, PLATFORM = {hidden!r}


LIBRARIES = {"cupy", "cuda", "matplotlib", "mpi4py", "numba", "transformers", "triton"}


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES or name in EXTENSIONS or name.split(".")[0] in LIBRARIES:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)


sysconfig.get_config_vars()  # it keeps what it finds, and looks for it by the name of the system
sys.meta_path.insert(0, Hidden())
for name in MODULES:
    sys.modules.pop(name, None)
for module, names in ((os, OS), (signal, SIGNALS)):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
read_text = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, *a, **k: read_text(
    pathlib.Path("/no") if str(path).startswith(("/proc", "/sys")) else path, *a, **k)
sys.platform = PLATFORM
"""

POSIX_ONLY = """
register_at_fork fork forkpty getuid geteuid getgid getegid getpgid killpg setsid wait4 pread pwrite sysconf uname
sched_getaffinity sched_setaffinity sched_yield nice getloadavg mkfifo chown fchmod statvfs O_NONBLOCK O_NOFOLLOW O_CLOEXEC
O_DIRECTORY memfd_create
"""
COMPILED = "backends.native._native", "orders._curves", "orders._points"
SYSTEMS = {
    "macOS": ([], ["sched_getaffinity", "sched_setaffinity", "sched_yield", "memfd_create", "posix_fadvise"], [], [], "darwin"),
    "Windows": (
        ["fcntl", "resource", "termios", "pwd", "grp", "posix", "pty", "tty", "syslog"],
        POSIX_ONLY.split(),
        ["SIGKILL", "SIGSTOP", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGPIPE", "setitimer", "alarm"],
        [f"dilkit.{name}" for name in COMPILED],
        "win32",
    ),
}
"""For each system: modules, names of `os` and of `signal`, and extensions that it lacks, and its name."""

USE = f"""
import dilkit
count = 0
for package in map(importlib.import_module, {tuple(ROOTS)}):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in EXTENSIONS and not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
                count += 1
            except ModuleNotFoundError as error:
                assert error.name.split(".")[0] in LIBRARIES, (module.name, error)
assert count > 150, count
pattern = dilkit.Pattern([8, 16], [1, 2])
problem = dilkit.Problem(pattern=pattern, seq=20, heads=2, head_dim=8)
q, k, v = torch.randn(3, 1, 20, 2, 8).requires_grad_().unbind()
want, *grads = None, None
for name in ("reference", "sdpa", *(() if EXTENSIONS else ("native",))):
    out = dilkit.dilated_attention(q, k, v, pattern, is_causal=True, backend=name)
    grad, = torch.autograd.grad(out.square().sum(), q)
    want = (out, grad) if want is None else want
    assert torch.allclose(out, want[0], atol=1e-5) and torch.allclose(grad, want[1], atol=1e-4), name
picked = dilkit.explain(problem)
print("picked", picked.picked, *[d.reasons for d in picked.decisions if d.name == "native"])
from dilkit.tools.cli import main
assert main(["info", "--json"]) == 0
try:
    print("order", dilkit.order((4, 4)).perm.tolist()[:3])
except ImportError as error:
    print("order", error)
from dilkit.comm import run_threads
from dilkit.comm.launch import processes
assert run_threads(2, lambda comm: comm.size) == [2, 2]
try:
    print("job", processes.launch("torch", 1, ["-c", "print(5)"]).text.strip())
except OSError as error:
    print("job", error)
"""


def said(system):
    done = in_subprocess("-c", HIDE.replace("{hidden!r}", repr(SYSTEMS[system])) + USE)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if not line.startswith("{"))


@pytest.mark.slow
def test_everything_is_imported_and_computes_without_what_macos_lacks():
    found = said("macOS")
    assert found["picked"].startswith("native")
    assert found["order"].startswith("[0, ")
    assert found["job"] == "5"


def test_what_windows_lacks_is_refused_when_it_is_asked_for():
    found = said("Windows")
    assert found["picked"].startswith("sdpa ('kernel native: this installation was built without it")
    assert "dilkit.orders._curves, which this installation was built without" in found["order"]
    assert "jobs of processes are started on POSIX systems alone" in found["job"]


def test_what_is_built_on_windows(monkeypatch):
    """Cython alone, with the compiler's own flags: neither POSIX threads nor vectors of GCC."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.chdir(ROOT)
    with mock.patch("setuptools.setup"), mock.patch("Cython.Build.cythonize", lambda given, **_: given):
        found = list(runpy.run_path("setup.py")["extensions"]())
    names = "_cache op._facts orders._locality backends.tiles._tiles comm.passes._rows decoding._checked decoding._kept_tokens"
    names += " decoding._streams decoding._tables"
    assert {extension.name for extension in found} == {f"dilkit.{name}" for name in names.split()}
    assert not any(x.extra_compile_args or x.extra_link_args or len(x.sources) != 1 for x in found)


def test_mps_is_computed_by_the_definition_and_that_is_said():
    device = Device("mps", "mps")
    assert str(torch.device("mps")) == device.type
    problem = Problem(pattern=Pattern([8], [1]), seq=16, heads=2, head_dim=8, device=device)
    found = explain(problem)
    assert found.picked == "reference"
    assert "no kernel runs on GPUs of Apple" in str(found.why)
    reasons = {decision.name: decision.reasons for decision in found.decisions if decision.verdict == "refused"}
    assert reasons["native"] == ("device mps: runs on cpu",)
    assert reasons["sdpa"] == ("device mps: runs on cpu, cuda, hip",)
    with pytest.raises(ValueError, match="device mps: runs on cpu"):
        select(problem, ("native",))


def test_a_call_on_mps_warns_unless_the_backend_is_named(monkeypatch):
    """The tensors lie on the CPU; only what is known of their device says otherwise."""
    monkeypatch.setattr("dilkit.problem.probe", lambda kind, index: Device("mps", "mps"))
    plan.cache_clear()
    q, k, v = torch.randn(3, 1, 17, 2, 8).unbind()
    pattern = Pattern([8, 17], [1, 2])
    named = dilated_attention(q, k, v, pattern, backend="reference")
    with pytest.warns(UserWarning, match="device mps: reference computes it"):
        out = dilated_attention(q, k, v, pattern)
    plan.cache_clear()
    assert torch.equal(out, named)
