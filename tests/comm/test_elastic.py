"""A training under torchrun, killed in step 6, goes on from the checkpoint of step 3: the program of docs/failures.md."""

import re
import shlex
import socket
import sys

import pytest
from helpers.project import ROOT

from dilkit.comm.launch.processes import NOT_HERE, start_processes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE or "there are jobs here")]

PAGE = (ROOT / "docs" / "failures.md").read_text()
(PROGRAM,) = re.findall(r'^```python title="elastic.py"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
((SETTINGS, COMMAND),) = re.findall(r"^\$ ((?:\w+=\S+ )*)torchrun (.*) elastic.py$", PAGE, re.MULTILINE)
LOSS = re.compile(r"^step (\d+) on (\d) ranks: loss (\d\.\d+)$", re.MULTILINE)
IN_A_STEP = "    part.backward()\n"
KILLED = f"""\
    if step == 6 and not Path("restarted").exists() and {{who}}:
        import os, signal, time
        time.sleep(0.5)  # the others are in the exchanges of this step
        Path("restarted").touch()
        [os.kill(process, signal.SIGKILL) for process in {{processes}}]
{IN_A_STEP}"""
LIMIT = 120.0
JOINED = 'dist.init_process_group("gloo")\n'
# Rank 0 comes first: after a restart it must not find where the rank 1 that died had listened.
LATER = f'import os, time\ntime.sleep(float(os.environ["RANK"]))\n{JOINED}'


def trained(folder, hosts, ranks, program=PROGRAM):
    (folder / "elastic.py").write_text(program.replace(JOINED, LATER))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = shlex.split(COMMAND.replace("host1:29400", endpoint).replace("--nproc-per-node 2", f"--nproc-per-node {ranks}"))
    options[options.index("--rdzv-conf") + 1] += ",is_host={}"
    more = ("--local-addr", "127.0.0.1", str(folder / "elastic.py"))
    jobs = []
    for host in hosts:
        given = [option.format(int(host == hosts[0])) for option in options]
        python = [sys.executable, "-m", "torch.distributed.run", *given, *more]
        jobs.append(start_processes([["env", f"--chdir={folder}", *SETTINGS.split(), *python]], [{"HOST": host}]))
    ended = [job.finish(LIMIT) for job in jobs]
    text = "\n".join(one.text for one in ended)
    assert ended[0].code == 0, text
    assert not any(one.left_behind for one in ended)
    return [one.text for one in ended]


def losses(*texts):
    return {(int(step), int(ranks)): loss for text in texts for step, ranks, loss in LOSS.findall(text)}


@pytest.fixture(scope="module")
def one_host_fewer(tmp_path_factory):
    """Return the losses after a host's ranks die with its torchrun, and the other goes on with one rank."""
    killed = KILLED.format(who='os.environ["HOST"] == "B"', processes="[os.getppid(), os.getpid()]")
    killed = killed.replace("    if step", "    import os\n    if step", 1).replace("import os, signal", "import signal")
    texts = trained(tmp_path_factory.mktemp("fewer"), ["A", "B"], 1, PROGRAM.replace(IN_A_STEP, killed))
    assert "PeerLost: exchange" in texts[0], texts[0]
    found = losses(*texts)
    assert [*sorted(found)] == sorted([(step, 2) for step in range(6)] + [(step, 1) for step in range(4, 12)]), texts
    return found


def test_with_one_host_fewer_the_losses_go_on(one_host_fewer):
    for step in (4, 5):
        assert float(one_host_fewer[step, 1]) == pytest.approx(float(one_host_fewer[step, 2]), rel=1e-6)


def test_a_rank_that_dies_is_started_again_with_the_same_bits(one_host_fewer, tmp_path):
    """Repeated steps and those of the other job have the same bits; the last steps differ by rounding."""
    killed = KILLED.format(who="comm.rank == 1", processes="[os.getpid()]")
    (text,) = trained(tmp_path, ["A"], 2, PROGRAM.replace(IN_A_STEP, killed))
    assert re.search(r"^\[rank 0\] PeerLost: exchange \d+ \(.*\): lost rank 1: ", text, re.MULTILINE), text
    found = [(int(step), loss) for step, _, loss in LOSS.findall(text)]
    assert [step for step, _ in found] == [*range(6), *range(4, 12)], text
    assert found[4:6] == found[6:8]
    assert [loss for _, loss in found[:6]] == [one_host_fewer[step, 2] for step in range(6)]
    for step, loss in found[8:]:
        assert float(loss) == pytest.approx(float(one_host_fewer[step, 1]), rel=1e-6)
