"""A small cohort: slides of a small encoder on disk, and a job over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers.slide_encoder import slide, small

from dilkit.integrations.gigapath.cohort.job import Job
from dilkit.integrations.gigapath.cohort.run import embed_share, finish, plan_cohort
from dilkit.integrations.gigapath.cohort.settings import ModelRecord, sha256_of

LENGTHS = (30, 7, 12, 7, 3)


def write_slide(path: Path, n: int, seed: int = 0, **said: Any) -> Path:
    """A file of features."""
    tiles, coords = slide(n, seed)
    torch.save({"features": tiles[0], "coords": coords[0], **said}, path)
    return path


def cohort(folder: Path, **changes: Any) -> tuple[list[Path], Job]:
    """Slides in files, and the job of embedding them; `changes` are of the job."""
    (folder / "out").mkdir()
    torch.save({"model": small().state_dict()}, folder / "weights.pth")
    paths = [write_slide(folder / f"s{i}.pt", n, seed=i) for i, n in enumerate(LENGTHS)]
    facts = dict(pooling="class token", dtype="float64", tail="zeros", ngrids=20, layers=False)
    model = ModelRecord("tiny", str(folder / "weights.pth"), sha256_of(folder / "weights.pth"), **facts)
    return paths, replace(Job(folder / "out", model), **changes)


def embed(paths: list[Path], job: Job) -> tuple[list[str], list[str], list[str]]:
    """Run a job in this process: the outputs that were written, those that were kept, and reasons of refusals."""
    plan = plan_cohort(paths, job)
    records, refused = embed_share(small(), plan, job)
    finish(plan, job, [*plan.refused, *refused])
    reasons = [one.reason for one in (*plan.refused, *refused)]
    return sorted(one.output for one in records), sorted(one.output for one in plan.kept), reasons


def right(n: int, seed: int) -> torch.Tensor:
    """The embedding of a slide, computed alone."""
    with torch.no_grad():
        return small()(*slide(n, seed))[0][0].float()
