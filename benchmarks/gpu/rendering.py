"""The page of results, made from the findings."""

from __future__ import annotations

import importlib.util
from itertools import groupby
from typing import Any

from benchmarks.machine import conditions

OPTIONAL = ("pynvml", "pyarrow", "polars", "pandas", "fastai", "torchrec", "fbgemm_gpu", "triton")


def conditions_of(device: str) -> list[str]:
    """Command, machine, GPUs and versions, a Markdown item each."""
    import torch

    if device == "cuda":
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        gpus = f"{', '.join(names)}; CUDA {torch.version.cuda}, NCCL {nccl}"
    else:
        gpus = "none: a dry run on CPU ranks, which shows nothing of GPUs"
    here = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    without = [name for name in OPTIONAL if name not in here]
    return [
        f"- GPUs: {gpus}",
        f"- installed: {', '.join(here) or 'none of the optional packages'}; not: {', '.join(without) or 'none'}",
        *conditions(("torch", "numpy", "cloudpickle", "psutil")),
    ]


def table(found: list[dict[str, Any]]) -> list[str]:
    """All findings as Markdown: a section for each part, then the conditions."""
    lines = ["# GPUs", ""]
    failed = [one for one in found if one["met"] is False]
    met = sum(one["met"] is True for one in found)
    lines += [f"{met} promises shown, {len(failed)} not.", ""]
    for part, some in groupby((one for one in found if one["what"] != "conditions"), lambda one: one["part"]):
        lines += [f"## {part}", "", "| what | found | promised | |", "|---|---|---|---|"]
        for one in some:
            verdict = {True: "as promised", False: "**not**", None: ""}[one["met"]]
            lines.append(f"| {_cell(one['what'])} | {_cell(one['value'])} | {_cell(one['bar'])} | {verdict} |")
        lines.append("")
    lines += ["## Conditions", ""]
    lines += list(dict.fromkeys(one["value"] for one in found if one["what"] == "conditions"))
    return lines


def _cell(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else repr(value)
    return " ".join(text.replace("|", "/").split())[:300]
