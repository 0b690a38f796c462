"""The splits of slides for training, validation and test: all of a patient's are in one. Imports no torch."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dilkit.checks import integer
from dilkit.integrations.gigapath.config import check_share
from dilkit.integrations.gigapath.finetuning.labels import SPLITS, Example, Labels

OTHERWISE = "choose another seed or larger shares, or give a column split"


@dataclass(frozen=True)
class Splits:
    """The slides of each split, as indices into `Labels.examples`. `drawn`: by chance, not by the file."""

    train: tuple[int, ...]
    val: tuple[int, ...]
    test: tuple[int, ...]
    drawn: bool


def split_examples(labels: Labels, seed: int = 0, val_share: float = 0.1, test_share: float = 0.2) -> Splits:
    """Split by the file, or else draw `test_share` and `val_share` of the patients; the rest is `train`.

    Patients of each class (for survival, with and without the event) are spread evenly over the splits. A patient is of the class
    of the first slide. A share of 0 draws none.

    Raises ValueError for shares that leave nothing to learn from, and for splits of which nothing can be learnt or judged: a
    class that only one of train and test has, no event, no pair of patients whose times can be compared.

        >>> import tempfile
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath.finetuning import read_labels, split_examples
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels.csv")
        ...     _ = path.write_text("slide,label\\n" + "".join(f"{i},{'ab'[i % 2]}\\n" for i in range(20)))
        ...     splits = split_examples(read_labels(path))
        >>> len(splits.train), len(splits.val), len(splits.test)
        (14, 2, 4)
    """
    if labels.has_splits:
        splits = _members(labels, {one.patient: str(one.split) for one in labels.examples}, drawn=False)
    else:
        splits = _drawn(labels, seed, val_share, test_share)
    check_splits(labels, splits)
    return splits


def _drawn(labels: Labels, seed: int, val_share: float, test_share: float) -> Splits:
    for name, share in (("val_share", val_share), ("test_share", test_share)):
        check_share(name, share)
    test, val = Fraction(str(test_share)), Fraction(str(val_share))
    if test + val >= 1:
        raise ValueError(f"val_share={val_share} and test_share={test_share} leave nothing to learn from: less than 1 is needed")
    patients = _shuffled_by_class(labels, integer("seed", seed))
    tested = _every(patients, test)
    rest = [one for one in patients if one not in tested]
    watched = _every(rest, val / (1 - test))
    side = {**dict.fromkeys(patients, "train"), **dict.fromkeys(tested, "test"), **dict.fromkeys(watched, "val")}
    return _members(labels, side, drawn=True)


def _members(labels: Labels, side: dict[str, str], drawn: bool) -> Splits:
    """Return the slides of each split, by the side that each patient is on."""
    train, val, test = (tuple(i for i, one in enumerate(labels.examples) if side[one.patient] == name) for name in SPLITS)
    return Splits(train, val, test, drawn)


def _shuffled_by_class(labels: Labels, seed: int) -> list[str]:
    """Return all patients, those of a class side by side, in an order of chance."""
    firsts: dict[str, Example] = {}
    for one in labels.examples:
        firsts.setdefault(one.patient, one)
    by_class: dict[str, list[str]] = defaultdict(list)
    for patient, one in firsts.items():
        by_class[str(one.event if labels.is_survival else one.label)].append(patient)
    chance = random.Random(seed)
    groups = [sorted(by_class[name]) for name in sorted(by_class)]
    for group in groups:
        chance.shuffle(group)
    return [patient for group in groups for patient in group]


def _every(patients: list[str], share: Fraction) -> dict[str, None]:
    """Return this share of the patients, at even distances."""
    half = Fraction(1, 2)
    chosen = (one for i, one in enumerate(patients) if math.floor((i + 1) * share + half) > math.floor(i * share + half))
    return dict.fromkeys(chosen)


def check_splits(labels: Labels, splits: Splits) -> None:
    """Raise ValueError where nothing can be learnt from `train` or judged on `test`, or a patient is on both sides."""
    sides: dict[str, str] = {}
    for name in SPLITS:
        for one in (labels.examples[i] for i in getattr(splits, name)):
            if (before := sides.setdefault(one.patient, name)) != name:
                raise ValueError(f"{labels.source}: line {one.line}: patient {one.patient!r} is in splits {before} and {name}")
    train, test = ([labels.examples[i] for i in indices] for indices in (splits.train, splits.test))
    if not train or not test:
        empty = "test" if train else "train"
        raise ValueError(f"{labels.source}: split {empty} has no slides ({len(labels.examples)} in all); {OTHERWISE}")
    if labels.is_survival:
        if not any(one.event for one in train):
            raise ValueError(f"{labels.source}: nobody in split train has event=1, so nothing can be learnt; {OTHERWISE}")
        if not _are_comparable(test):
            raise ValueError(f"{labels.source}: no two patients in split test have times that can be compared; {OTHERWISE}")
        return
    _check_classes(labels, train, test)


def _check_classes(labels: Labels, train: Sequence[Example], test: Sequence[Example]) -> None:
    """Raise ValueError for a class that is in one of both alone."""
    for name, others, other in (("train", test, "test"), ("test", train, "train")):
        classes = {one.label for one in (train if name == "train" else test)}
        if lacking := [one for one in others if one.label not in classes]:
            raise ValueError(
                f"{labels.source}: split {name} has no slide of class {lacking[0].label!r}, which line {lacking[0].line} of "
                f"split {other} is of; {OTHERWISE}"
            )


def _are_comparable(examples: Iterable[Example]) -> bool:
    """True if the event of one patient was seen before the time of another was over."""
    seen = [one for one in examples if one.time is not None]
    first = min((one.time for one in seen if one.event and one.time is not None), default=math.inf)
    return any(one.time is not None and one.time > first for one in seen)
