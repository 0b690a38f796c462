"""The command line: what it prints, what it exits with, and that it works where torch does not."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import in_subprocess, json_output, output
from helpers.fakes import family, registered
from helpers.pairwise import all_but

from dilkit.environment import TUNED
from dilkit.problem import DTYPES
from dilkit.selection.preference_table import ON_GPUS, TABLE
from dilkit.tools.cli import COMMANDS, main
from dilkit.tools.demo.ranks.layout import MOST_STARTED

pytestmark = pytest.mark.surroundings


def test_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--help")
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert all(f"\n  {code} " in text for code in (0, 1, 2, 130))
    assert all("--json" in output(capsys, command, "--help") for command in COMMANDS)
    assert "commands:" in output(capsys, code=2)
    assert output(capsys, "--version").startswith("dilkit 0.")


def test_a_command_that_cannot_be_loaded_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dilkit.tools.commands.draw", None)
    assert "cannot be loaded" in output(capsys, "--help")
    assert main(["draw"]) == 2
    assert capsys.readouterr().err.startswith("dilkit draw: this command cannot be loaded: ModuleNotFoundError")
    assert "picked" in output(capsys, "info")


@pytest.mark.parametrize("where", ["dilkit.tools.commands.info.command.run", "dilkit.tools.cli.importlib.import_module"])
def test_interruption(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """While a command runs, and while it is loaded."""

    def interrupted(argument: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "dilkit: interrupted\n"


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_of_a_destructor_is_not_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """Python prints and forgets what a destructor raises."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def run(args: Any) -> int:
        Dying()
        time.sleep(30)
        return 0

    monkeypatch.setattr("dilkit.tools.commands.info.command.run", run)
    assert main(["info"]) == code
    assert capsys.readouterr().err == "dilkit: interrupted\n"


@pytest.mark.parametrize("command", all_but(["bench", "tune", "draw"], ["verify", "bench", "tune", "draw", "demo"]))
def test_interruption_ends_a_command_even_if_torch_would_swallow_it(tmp_path: Path, command: str) -> None:
    swallowed = "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    print('went on')\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(f"import os, signal\n{swallowed}")
    out = ["--out", str(tmp_path / "out")] if command in ("bench", "demo") else []
    tuned = {TUNED.name: str(tmp_path / "tuned.json")}
    # A job in the background of a script inherits that Ctrl-C is ignored; here it must not be.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from dilkit.tools.cli import main; "
    done = in_subprocess("-c", f"{start}sys.exit(main(sys.argv[1:]))", command, *out, PYTHONPATH=str(tmp_path), **tuned)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "dilkit: interrupted\n")


BAD = {
    "frobnicate": "COMMAND: invalid choice: 'frobnicate'",
    "encode": "; did you mean encode-slide?",
    "inof": "; did you mean info?",
    "info --head 3": "unrecognized arguments: --head 3; did you mean --heads?",
    "info --backend nativ": "; did you mean native?",
    "info --tail exakt": "; did you mean exact?",
    "info --dtype flaot16": "; did you mean float16?",
    "encode-slide none.h5 --checkpoint x.pth --out o": "'none.h5' does not exist; give files of tile features (.pt,",
    "info --assume gtx1080": "--assume: device 'gtx1080' is not a compute capability",
    "info --device tpu": "--device: 'tpu' is not known",
    "info --device sm_61": "`dilkit info --assume sm_61`",
    "info --device cuda:99": "--device: 'cuda:99' is not there",
    "info --device cpu --assume sm_61": "--assume: not allowed with argument --device",
    "info --seq 0": "--seq: '0' is not a whole number of 1 or more",
    "info --dim 1.5": "--dim: '1.5' is not a whole number",
    "info --dtype int8": "--dtype: 'int8' is not known",
    "info --kv-heads 3": "--kv-heads: 3 does not divide --heads 8",
    "info --segments 8,x": "--segments: 'x' is not a whole number",
    "info --segments 8,16 --rates 1": "--segments, --rates: ",
    "info --segments 8 --rates 9": "dilation_rates[0]=9 exceeds segment_lengths[0]=8",
    "info --segments dense --rates 2": "--rates: (2,) does not go with --segments dense",
    "info --backend abacus": "--backend: 'abacus' is not a known backend",
    "info --preset unet": "--preset: 'unet' is not a known preset; known: gigapath",
    "info --preset gigapath --segments 8": "--segments, --rates: ",
    "info --seqs 8": "unrecognized arguments: --seqs",
    "bench --resume": "--resume: goes with --suite alone",
    "bench --suite ring --full": "--full: does not go with --suite ring",
    "bench --backend nobody": "--backend: 'nobody' is not known",
    "bench --baseline nobody": "--baseline: 'nobody' is not known; choose from gather, longnet, dense",
    "bench --backend reference,": "--backend: 'reference,' has an empty",
    "bench --seq 8 --seqs 8,16": "--seqs: does not go with --seq 8",
    "bench --budget 0": "--budget: '0' is not a number above 0",
    "bench --suite ring --comm threads --world-size 2": "--comm: does not go with --suite ring",
    "bench --schedules ring": "--schedules: goes with --comm alone",
    "bench --world-size 3": "--world-size: goes with --comm alone",
    "bench --comm threads --world-size 2 --schedules star": "--schedules: 'star' is not known",
    "bench --comm threads --world-size 2 --baseline dense": "--baseline: does not go with --comm",
    "bench --overhead --baseline dense": "--baseline: does not go with --overhead",
    "bench --overhead --seqs 8,16": "one backend at one length",
    "demo --sample x --comm threads": "--comm: has no meaning with --sample",
    "demo --ranks 0x2": "--ranks: '0x2' is not DATAxSEQUENCE, two whole numbers of 1 or more, as 2x2",
    "demo --ranks 2": "--ranks: '2' is not DATAxSEQUENCE",
    "demo --ranks 1x65 --context 64": "--ranks: 1x65 cuts a context of 64 bytes over 65 ranks",
    f"demo --ranks 1x{MOST_STARTED + 1}": f"is {MOST_STARTED + 1} processes, and at most {MOST_STARTED} are started",
    "demo --ranks 1x2 --image": "--image: has no meaning with --ranks",
    "demo --ranks 1x2 --comm torch": "--comm: has no meaning with --ranks",
    "draw --seq 5000": "--seq: 5000 is more than a picture can show; at most 2048",
    "draw --heads 100": "--heads: 100 is more than a picture can show; at most 64",
    "draw --out x.jpg": "--out: 'x.jpg' must end in .png, .svg, .pdf",
    "draw --out no/such/folder/x.png": "--out: the folder 'no/such/folder' does not exist",
    "plan --seq 5": "--world-size: 8 ranks cannot share out --seq 5",
    "plan --rates 1,2": "--rates: without --segments",
    "plan --bandwidth 50": "--bandwidth: '50' has no unit; write bytes or bits a second, as 50GB/s or 50Gbit/s",
    "plan --flops 400": "--flops: '400' has no unit; write operations a second, as 400T or 400e12",
    "plan --bandwidth fast": "--bandwidth: 'fast' is not a bandwidth; write",
    "plan --flops -1": "--flops: ",
    "plan --overlap once --schedule ring": "schedule='ring' sums up what each branch finds",
    "order --shape 64y64": "--shape: '64y64': '64y64' is not a whole number of 1 or more; write sides as 64x64",
    "order --shape 0x4": "--shape: '0x4': '0' is not a whole number of 1 or more",
    "order --shape 2x2x2x2": "--shape: '2x2x2x2' has 4 sides; a grid has 1, 2 or 3",
    "order --shape 1Mx1M": "--shape: 1,099,511,627,776 tokens are more than this command measures; at most 16,777,216",
    "order --tile 4x4x4": "tile=(4, 4, 4)",
    "order --window 3x3x3": "window=(3, 3, 3) has 3 sides; the grid has 2",
    "order --window 3x4": "window=(3, 4) has the even side 4, which has no middle cell",
    "order --shape 4x2000 --png x.png": "--shape: a side of 2,000 is more than a picture can show; at most 1,024",
    "tune --seq 8 --seqs 8,16": "--seqs: does not go with --seq 8",
    "tune --show --seqs 5,6": "--seqs: does not go with --show, which is about all orders of the file",
    "tune --clear --causal": "--causal: does not go with --clear, which is about all orders of the file",
    "tune --show --clear": "--clear: not allowed with argument --show",
}


@pytest.mark.parametrize("command", sorted({line.split()[0] for line in BAD}))
def test_a_bad_argument_is_one_line_naming_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
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
def test_info_names_the_pick_and_fits_in_100_columns(capsys: pytest.CaptureFixture[str], picky: str) -> None:
    text = output(capsys, "info", "--all", "--assume", "sm_61", "--dtype", "fp16", "--train", "--causal", "--mask")
    assert "float16, is_causal, key_padding_mask, requires_grad" in text
    assert "sm_61" in text
    assert "picked" in text
    assert "head_dim 64: at most 16" in text
    assert max(map(len, text.splitlines())) <= 100


def test_info_says_of_gpus_what_the_pages_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(ON_GPUS)
    assert words in " ".join(output(capsys, "info", "--assume", "sm_90").split())
    assert words not in " ".join(output(capsys, "info", "--assume", "cpu").split())


def test_info_says_what_to_install_for_a_gpu_that_torch_has_no_code_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_75 sm_80 sm_90 compute_120", raising=False)
    [note] = json_output(capsys, "info", "--assume", "sm_61")["problem"]["notes"]
    assert "has no code for sm_61: install a torch built for CUDA 12.6" in note
    assert not json_output(capsys, "info", "--assume", "sm_86")["problem"]["notes"]


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        ("sm_60", "float32", "sum in float16, which loses small weights"),
        ("sm_75", "float16", "Tesla T4 has tensor cores"),
        ("sm_80", "float16", "A100 has tensor cores"),
        ("sm_90", "float16", "H100 has tensor cores"),
        ("cpu", "float32", "no faster on cpu"),
    ],
)
def test_info_picks_for_a_preset_in_the_dtype_that_suits_the_device(
    capsys: pytest.CaptureFixture[str], device: str, dtype: str, why: str
) -> None:
    report = json_output(capsys, "info", "--assume", device, "--preset", "gigapath")
    judged = report["problem"]
    assert judged["problem"].startswith(f"1 x 10,001 tokens, 16 heads x 48, {dtype}, Pattern([1024, 5792, ")
    assert judged["problem"].endswith("offset='block', tail='zeros')")
    assert judged["picked"]
    assert judged["why"]
    assert f"{dtype}: " in report["preset"]
    assert why in report["preset"]


def test_what_is_given_wins_over_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--dtype", "bf16", "--seq", "16384", "--heads", "8"]
    text = output(capsys, "info", *given[:4], "--assume", "sm_80", "--preset", "gigapath", *given[4:])
    assert "1 x 16,384 tokens, 8 heads x 48, bfloat16, Pattern([1024, 5792, " in text
    assert "preset GigaPath's slide encoder on 10,000 tiles\n" in text


def test_info_all_judges_every_known_device_for_every_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    report = json_output(capsys, "info", "--all", "--device", "cpu")
    matrix, orders = report["matrix"], report["orders"]
    assert sum("assumed" in row["device"] for row in matrix) == 10 * 4
    assert [(row["label"][:3], row["dtype"]) for row in matrix[:4]] == [("cpu", dtype) for dtype in DTYPES]
    assert all(row["picked"] and row["why"] for row in matrix)
    assert [row["number"] for row in orders] == list(range(1, len(TABLE) + 1))
    for row in matrix:
        decided = orders[row["row"] - 1]
        assert decided["device"] == row["label"].split()[0].replace("sm", "cuda").partition("_")[0]
        assert decided["why"] in row["why"]


def test_info_all_shows_the_table_and_why_where_that_does_not_decide(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "info", "--all")
    assert "\n  1   cpu, any dtype: native, sdpa, reference\n" in text
    assert "by design, until `dilkit tune` has measured" in " ".join(text.split())
    (row,) = [line for line in text.splitlines() if line.startswith("  cpu ") and "native 1" in line]
    assert row.split()[-8:] == ["native", "1"] * 4
    text = output(capsys, "info", "--all", "--backend", "reference")
    assert "picked for other reasons than the table's\n  a  asked for\n" in text
    assert "reference a" in text


def test_info_all_says_what_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    raw = family(cupy=False)["cupy_raw"]
    raw.name, raw.requires = "raw", ("cupy_that_is_not_there",)  # type: ignore[misc]
    with registered(raw):
        text = " ".join(output(capsys, "info", "--all").split())
    assert text.count("raw module cupy_that_is_not_there: not installed (pip install 'dilkit[cuda]')") == 1


def test_info_exits_with_1_when_nothing_is_picked(capsys: pytest.CaptureFixture[str], picky: str) -> None:
    judged = json_output(capsys, "info", "--backend", picky, code=1)["problem"]
    assert judged["picked"] is None
    [reasons] = [b["reasons"] for b in judged["backends"] if b["name"] == picky]
    assert reasons == ["dtype float32: computes float16", "head_dim 64: at most 16"]


def test_info_shows_a_malformed_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as needed:
        needed.setenv("DILKIT_BACKEND", "abacus")
        text = output(capsys, "info", code=2)
    assert "cannot be judged: ValueError: DILKIT_BACKEND='abacus' is not a known backend" in text
    assert "DILKIT_BACKEND      MALFORMED: ValueError: DILKIT_BACKEND='abacus'" in text
    monkeypatch.setenv("DILKIT_CACHE_BYTES", "lots")  # which the problem does not need
    report = json_output(capsys, "info", code=2)
    assert report["problem"]["picked"]
    [error] = [v["error"] for v in report["environment"] if v["error"]]
    assert "DILKIT_CACHE_BYTES='lots' must be a whole number of bytes" in error


@pytest.fixture
def broken_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import torch` fails, as it does after half an installation."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object file')\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_info_works_where_torch_is_broken(broken_torch: dict[str, str]) -> None:
    done = in_subprocess("-m", "dilkit", "info", "--all", "--assume", "sm_61", **broken_torch)
    assert done.returncode == 1
    assert "torch cannot be imported, so nothing can run here: ImportError: libtorch_cpu.so" in " ".join(done.stdout.split())
    assert "sm_90 H100" in done.stdout
    assert not done.stderr
    report = json.loads(in_subprocess("-m", "dilkit", "info", "--json", **broken_torch).stdout)
    assert "libtorch_cpu.so" in report["versions"]["torch"]["error"]


@pytest.mark.parametrize("command", [pytest.param("verify", marks=pytest.mark.slow), "draw"])
def test_other_commands_say_that_torch_is_broken(broken_torch: dict[str, str], command: str) -> None:
    done = in_subprocess("-m", "dilkit", command, **broken_torch)
    assert done.returncode == 2
    assert done.stderr.startswith(f"dilkit {command}: a part of the installation cannot be used: ImportError: libtorch_cpu.so")
    assert done.stderr.count("\n") == 1


@pytest.mark.smoke
def test_torch_is_imported_only_when_needed() -> None:
    used = ["import dilkit", "dilkit.Pattern, dilkit.list_backends()", "from dilkit.tools.cli import main; main(['--help'])"]
    code = "; ".join(["import sys", *(f"{one}; print('torch' in sys.modules, file=sys.stderr)" for one in used)])
    assert in_subprocess("-c", code).stderr == "False\n" * 3
