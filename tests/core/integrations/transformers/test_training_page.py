"""The programs of docs/training.md and docs/transformers.md, run on the ranks that the pages name, against one process."""

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import launch
from helpers.language_models import transformers
from helpers.project import ROOT, succeed

from dilkit import Pattern
from dilkit.comm import Comm

package = transformers()
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from dilkit.integrations.transformers import context_parallel, convert  # noqa: E402

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "training.md").read_text()
TRANSFORMERS = (ROOT / "docs" / "transformers.md").read_text()
PROGRAMS = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```', PAGE + TRANSFORMERS, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ python (-m torch\.distributed\.run .*)$", PAGE, re.MULTILINE)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def run(name: str, folder: Path, check: str = "", **numbers: str) -> str:
    (folder / name).write_text(PROGRAMS[name] + check)
    command = next(command for command in COMMANDS if f" {name}" in command and ("--resume" in command) == ("resume" in numbers))
    arguments = command.split()
    if ranks := numbers.get("ranks"):
        arguments[arguments.index("--nproc-per-node") + 1] = ranks
    return succeed(sys.executable, *arguments, cwd=folder, OMP_NUM_THREADS="1")


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


def alone(family: str, shape: tuple[int, ...], pattern: Pattern | None = None, **options) -> list[float]:
    """The losses of the page's model in one process, which is this one."""
    torch.manual_seed(0)
    config = getattr(package, f"{family}Config")(**SIZES, vocab_size=256, **options)
    model = getattr(package, f"{family}ForCausalLM")(config)
    if pattern is not None:
        convert(model, pattern)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for tokens in torch.randint(256, shape, generator=torch.Generator().manual_seed(1)):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_four_ranks_train_as_one_and_one_goes_on_from_what_they_saved(tmp_path):
    """One process computes eager attention, of which nothing is dilkit's."""
    expected = alone("Mistral", (6, 4, 101), sliding_window=16, attn_implementation="eager")
    assert losses(run("train.py", tmp_path)) == pytest.approx(expected, abs=2e-5)
    assert losses(run("train.py", tmp_path, resume="yes", ranks="1")) == pytest.approx(expected[3:], abs=2e-5)


ACCUMULATED = """
from dilkit.integrations.transformers import convert
mine = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
torch.manual_seed(0)
alone = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
convert(alone, Pattern([16, 64], [1, 4]))
alone.bfloat16()
loss = sum(alone(**batch).loss for batch in batches) / 2
loss.backward()
for name, p in alone.named_parameters():
    difference = (mine[name] - p.grad.float()).norm() / p.grad.float().norm()
    assert difference < 0.03, (name, difference)
print("equal")
"""


def test_batches_accumulate_in_half_precision_with_layers_computed_again(tmp_path):
    assert run("accumulate.py", tmp_path, ACCUMULATED).count("equal") == 2


def on_ranks(comm: Comm):
    torch.manual_seed(0)
    model = package.LlamaForCausalLM(package.LlamaConfig(**SIZES, vocab_size=256))
    ranks = context_parallel(model, init_device_mesh("cpu", (comm.size,)), pattern=Pattern([16, 64], [1, 4]))
    tokens = torch.randint(256, (1, 101), generator=torch.Generator().manual_seed(1))
    batch, results = dict(**ranks.shard(dict(input_ids=tokens, labels=tokens)), use_cache=False), []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        out = call(**batch)
        out.loss.backward()
        results.append([out.logits.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results)


def test_a_compiled_model_is_one_graph():
    launch.run("gloo", 2, on_ranks)


TRAINED = """
mine = {name: p.detach().clone() for name, p in model.named_parameters()}
from dilkit.integrations.transformers import convert
dist.destroy_process_group()
import os
for name in list(os.environ):
    if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("MASTER_", "TORCHELASTIC")):
        del os.environ[name]
from accelerate.state import AcceleratorState, PartialState
AcceleratorState._reset_state(reset_partial_state=True)
torch.manual_seed(0)
alone = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
convert(alone, Pattern([16, 64], [1, 4]))
class InOrder(Trainer):
    get_train_dataloader = RanksTrainer.get_train_dataloader
arguments = TrainingArguments("out", use_cpu=True, average_tokens_across_devices=False, **steps, **quiet)
InOrder(alone, arguments, train_dataset=trainer.train_dataset).train()
for name, p in alone.named_parameters():
    torch.testing.assert_close(mine[name], p.detach(), atol=2e-5, rtol=2e-4)
print("equal")
"""


def test_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed; Trainer needs it")
    assert run("trainer.py", tmp_path, TRAINED).count("equal") == 2


def of_mpirun(folder: Path, program: str) -> str:
    (folder / "job.py").write_text(program)
    job = launch.starter("openmpi")("mpi", 2, [str(folder / "job.py")]).finish()
    assert job.code == 0, job
    return job.text


def test_the_same_under_mpirun(tmp_path):
    expected = alone("Llama", (3, 2, 101), Pattern([16, 64], [1, 4]))
    assert losses(of_mpirun(tmp_path, PROGRAMS["train_mpi.py"])) == pytest.approx(expected, abs=2e-5)


def test_windows_over_two_ranks_by_mpirun(tmp_path):
    """test_context_parallel.py runs the program on threads."""
    (tmp_path / "windows.py").write_text(PROGRAMS["windows.py"])
    (program,) = re.findall(r'^\$ mpirun -n 2 python -c "(.*)"$', TRANSFORMERS, re.MULTILINE)
    assert sorted(re.findall(r"rank \d: (\d+) of 101 rows", of_mpirun(tmp_path, program))) == ["50", "51"]
