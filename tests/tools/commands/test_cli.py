"""The command line."""

import io
import signal
import sys
import threading
import time

import pytest
from helpers.command_line import in_subprocess, json_output, output
from helpers.fakes import Picky, registered

from dilkit import Device, explain
from dilkit.environment import TUNED
from dilkit.tools.cli import COMMANDS, main
from dilkit.tools.commands.info import ASKED, OF_WHOLE_SEQUENCES, by_kind, kind_cells
from dilkit.tools.console import progress
from dilkit.tools.demo.ranks import MOST_STARTED

pytestmark = pytest.mark.surroundings


def test_help_lists_every_command_and_exit_code(capsys):
    text = output(capsys, "--help")
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert all(f"\n  {code} " in text for code in (0, 1, 2, 130))
    assert all("--json" in output(capsys, command, "--help") for command in COMMANDS)
    assert "commands:" in output(capsys, code=2)
    assert output(capsys, "--version").startswith("dilkit 0.")


def test_a_command_that_cannot_be_loaded_hides_no_other(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dilkit.tools.commands.draw", None)
    assert "cannot be loaded" in output(capsys, "--help")
    assert main(["draw"]) == 2
    assert capsys.readouterr().err.startswith("dilkit draw: this command cannot be loaded: ModuleNotFoundError")
    assert "picked" in output(capsys, "info")


@pytest.mark.parametrize("where", ["dilkit.tools.commands.info.run", "dilkit.tools.cli.importlib.import_module"])
def test_interruption(capsys, monkeypatch, where):
    """While a command runs, and while it is loaded."""

    def interrupted(argument):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "dilkit: interrupted\n"


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_of_a_destructor_is_not_lost(capsys, monkeypatch, number, code):
    """Python prints and forgets what a destructor raises, and what is raised while that is reported: here, slowly."""
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (start(thread), time.sleep(0.05)))

    class Dying:
        def __del__(self):
            signal.raise_signal(number)

    def run(args):
        Dying()
        time.sleep(30)
        return 0

    monkeypatch.setattr("dilkit.tools.commands.info.run", run)
    assert main(["info"]) == code
    assert capsys.readouterr().err == "dilkit: interrupted\n"


BAD = {  # beside those of tests/core/malformed/commands.py
    "info --head 3": "unrecognized arguments: --head 3; did you mean --heads?",
    "info --dtype flaot16": "; did you mean float16?",
    "encode-slide none.h5 --checkpoint x.pth --out o": "'none.h5' does not exist; give files of tile features (.pt,",
    "info --device sm_61": "`dilkit info --assume sm_61`",
    "info --segments dense --rates 2": "--rates: (2,) does not go with --segments dense",
    "bench --suite ring --rows a": "--rows: does not go with --suite ring",
    "bench --backend reference,": "--backend: 'reference,' has an empty",
    "bench --overhead --seqs 8,16": "one backend at one length",
    "demo --ranks 0x2": "--ranks: '0x2' is not DATAxSEQUENCE, two whole numbers of 1 or more, as 2x2",
    f"demo --ranks 1x{MOST_STARTED + 1}": f"is {MOST_STARTED + 1} processes, and at most {MOST_STARTED} are started",
    "demo --ranks 1x2 --image": "--image: has no meaning with --ranks",
    "draw --heads 100": "--heads: 100 is more than a picture can show; at most 64",
    "draw --out x.jpg": "--out: 'x.jpg' must end in .png, .svg, .pdf",
    "draw --out no/such/folder/x.png": "--out: the folder 'no/such/folder' does not exist",
    "plan --bandwidth 50": "--bandwidth: '50' has no unit; write bytes or bits a second, as 50GB/s or 50Gbit/s",
    "plan --flops 400": "--flops: '400' has no unit; write operations a second, as 400T or 400e12",
    "plan --pattern Pattern([8,9999],[1,9],overlap='once') --schedule ring": "schedule='ring' sums the results of branches",
    "order --window 3x3x3": "window=(3, 3, 3) has 3 sides; the grid has 2",
    "order --shape 4x2000 --png x.png": "--shape: a side of 2,000 is more than a picture can show; at most 1,024",
}


@pytest.mark.parametrize("command", sorted({line.split()[0] for line in BAD}))
def test_a_bad_argument_is_one_line_naming_it(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setenv(TUNED.name, "tuned.json")
    monkeypatch.chdir(tmp_path)
    for line in (line for line in BAD if line.split()[0] == command):
        assert main(line.split()) == 2, line
        printed = capsys.readouterr()
        assert not printed.out, line
        assert printed.err.startswith("dilkit"), line
        assert BAD[line] in printed.err
        assert printed.err.count("\n") == 1, line
        assert not list(tmp_path.iterdir()), line


@pytest.mark.smoke
def test_info_names_the_pick_and_fits_in_100_columns(capsys):
    with registered(Picky()) as picky:
        judged = json_output(capsys, "info", "--backend", picky, code=1)["problem"]
        assert judged["picked"] is None
        [reasons] = [b["reasons"] for b in judged["backends"] if b["name"] == picky]
        assert reasons == ["dtype float32: computes float16", "head_dim 64: at most 16"]
        text = output(capsys, "info", "--all", "--assume", "sm_61", "--dtype", "fp16", "--train", "--causal", "--mask")
        assert "float16, is_causal, key_padding_mask, requires_grad" in text
        assert "sm_61" in text
        assert "picked" in text
        assert "head_dim 64: at most 16" in text
        assert max(map(len, text.splitlines())) <= 100


def test_info_says_what_to_install_for_a_gpu_that_torch_has_no_code_for(capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_75 sm_80 sm_90 compute_120", raising=False)
    [note] = json_output(capsys, "info", "--assume", "sm_61")["problem"]["notes"]
    assert "has no code for sm_61: install a torch built for CUDA 12.6" in note
    assert not json_output(capsys, "info", "--assume", "sm_86")["problem"]["notes"]
    [note] = json_output(capsys, "info", "--assume", "gfx942", "--dtype", "bf16")["problem"]["notes"]
    assert note.endswith("install a torch built for ROCm")


def test_info_all_shows_the_picks_and_the_table(capsys):
    text = output(capsys, "info", "--all")
    words = " ".join(text.split())
    assert "\n  1   cpu, any dtype: native, sdpa, reference: one pass" in text
    assert "by design, until `dilkit tune` has measured" in words
    assert [line.split()[-4:] for line in text.splitlines() if line.startswith("  cpu ")][-1] == ["native"] * 4


def test_info_kinds_says_who_computes_each_kind_on_a_device(capsys):
    own = kind_cells(Device.assume("cpu"), "float32", lambda problem: explain(problem))
    cells = json_output(capsys, "info", "--kinds", "--device", "cpu")["kinds"]
    assert cells == own
    of_call = by_kind(own)["blocks of each call"]
    assert of_call == {asked: "-" if asked in OF_WHOLE_SEQUENCES else "native" for asked in ASKED}
    assert "left to the definition, which is slow: " in output(capsys, "info", "--kinds", "--assume", "sm_61")


def test_info_works_where_torch_is_broken_and_others_say_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    broken_torch = {"PYTHONPATH": str(tmp_path)}
    done = in_subprocess("-m", "dilkit", "info", "--all", "--assume", "sm_61", **broken_torch)
    assert done.returncode == 1
    assert "torch cannot be imported, so nothing can run here: ImportError: libtorch_cpu.so" in " ".join(done.stdout.split())
    assert "sm_90 H100" in done.stdout
    assert not done.stderr
    done = in_subprocess("-m", "dilkit", "draw", **broken_torch)
    assert done.returncode == 2
    assert done.stderr.startswith("dilkit draw: a part of the installation cannot be used: ImportError: libtorch_cpu.so")
    assert done.stderr.count("\n") == 1


@pytest.mark.smoke
def test_torch_is_imported_only_when_needed():
    used = {
        "import dilkit; dilkit.Pattern([8], [2])": "{'torch'}",
        "dilkit.list_backends()": "{'torch', 'triton', 'numba'}",
        "from dilkit.tools.cli import main; main(['--help'])": "{'torch'}",
    }
    shown = (f"{one}; print({modules} & {{*sys.modules}}, file=sys.stderr)" for one, modules in used.items())
    assert in_subprocess("-c", "; ".join(["import sys", *shown])).stderr == "set()\n" * 3


def test_progress_that_nobody_reads_any_more_stops_no_work(monkeypatch):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "BETWEEN", 0.0)
    for unread in (Broken(), None):  # pythonw.exe has no standard error
        monkeypatch.setattr(sys, "stderr", unread)
        assert list(progress.progress(range(3))) == [0, 1, 2]
