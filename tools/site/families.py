"""Tables of the classes of transformers' models, and whether they compute with dilkit."""

import json
import re
from pathlib import Path
from typing import Any

from dilkit.tools.report.markdown import rows_markdown

EXAMINED = Path("tests", "families", "examined.json")
OTHER_LAYERS = "beside attention, layers of it mix tokens by convolution, recurrence or linear attention"
KINDS = {
    "language models": "LlamaModel mistral qwen3 gemma3_text phi3 gpt_oss olmo3 GPT2Model opt bloom mpt falcon gptj xglm",
    "mixtures of experts": "mixtral deepseek_v3 qwen3_moe llama4_text minimax_m2 dots1 deepseek_v32 doge",
    "with state-space or linear layers": "jamba bamba nemotron_h qwen3_next lfm2 zamba2 falcon_h1 mamba2",
    "encoders of text": "bert roberta modernbert electra distilbert esm albert deberta-v2 longformer roformer",
    "encoders and decoders": "bart t5 mt5 umt5 pegasus marian m2m_100 longt5 led prophetnet",
    "images": "vit dinov2 dinov3_vit deit beit siglip yolos sam3_vit_model sam swinv2 dinat segformer",
    "images and text": "clip llava qwen3_vl gemma3 internvl idefics3 mllama paligemma blip flava",
    "video": "vivit videomae vjepa2 timesformer sam2",
    "sound": "whisper wav2vec2 hubert audio-spectrogram-transformer moonshine voxtral wav2vec2-conformer wavlm speecht5",
    "time series": "patchtst timesfm2_5 time_series_transformer informer autoformer",
}
"""Families that the summary names, the best known of each kind. Of Llama and GPT-2 the class is tried, under another family."""


def family_summary(root: Path) -> str:
    """Return a row for each kind of model: its best-known families, by whether all of their classes equal eager attention."""
    tried = json.loads((root / EXAMINED).read_text())
    verdicts: dict[str, set[str]] = {}
    for one in tried["classes"]:
        for name in (one["family"], one["model"]):
            verdicts.setdefault(name, set()).add(one["verdict"])
    rows: list[tuple[str, ...]] = [
        ("kind", "equal to eager attention", "refused, in part or whole", "not tried, or without attention")
    ]
    for kind, names in KINDS.items():
        columns: dict[str, list[str]] = {"equal": [], "refused": [], "": []}
        for name in filter(verdicts.__contains__, names.split()):
            words = " ".join(verdicts[name])
            columns[next(word for word in ("refused", "equal", "") if word in words)].append(f"`{name}`")
        rows.append((kind, *(", ".join(column) or "-" for column in columns.values())))
    return f"{_title(tried)}\n\n{rows_markdown(rows)}"


def family_table(root: Path) -> str:
    """Return a row for each verdict and reason: the classes of models that `tests/families/run.py` tried, and their families."""
    tried = json.loads((root / EXAMINED).read_text())
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in tried["classes"]:
        reason = OTHER_LAYERS if one["every_layer_asks"] is False else _reason(one["verdict"], one["reason"])
        groups.setdefault(one["verdict"], {}).setdefault(reason, []).append(one)
    rows = [("", "reason", "classes", "families")]
    for verdict, by_reason in sorted(groups.items(), key=lambda group: (-sum(map(len, group[1].values())), group[0])):
        for reason, classes in sorted(by_reason.items(), key=lambda pair: -len(pair[1])):
            families = ", ".join(f"`{name}`" for name in sorted({one["family"] for one in classes}))
            rows.append((verdict, reason, str(len(classes)), families))
    return f"{_title(tried)}\n\n{rows_markdown(rows)}"


def _title(tried: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in tried["versions"].items())
    return f"{len(tried['classes'])} classes, with {versions}:"


def _reason(verdict: str, reason: str) -> str:
    """Return a reason without names and numbers that differ from class to class."""
    if verdict == "not tried":
        return "a package is missing" if reason.startswith("ImportError") else "no tiny model of it ran with `eager` attention"
    words = re.sub(r"\b(a )?tensor \([\d, ]*\)", "a tensor", reason.partition(";")[0])
    return re.sub(r"\d[\d,]*", "n", re.sub(r"\b\w+(Attention|Config|Model)\b", "it", words)).strip()
