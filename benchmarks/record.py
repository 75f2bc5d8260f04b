"""What every benchmark writes beside its figures: the hardware and the commit."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def record(name: str, figures: dict[str, Any]) -> None:
    """Write benchmarks/results/NAME.json and print it."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    about = {
        "commit": commit.stdout.strip() or "unknown",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**about, **figures}, indent=1, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def check(figures: dict[str, Any], limits: dict[str, tuple[str, float]]) -> int:
    """Say which figures keep their limits, such as {"seconds": ("<=", 600)}; return how many do not."""
    failed = 0
    for name, (relation, limit) in limits.items():
        kept = figures[name] <= limit if relation == "<=" else figures[name] >= limit
        failed += not kept
        print(f"{'kept  ' if kept else 'FAILED'} {name} = {figures[name]:.4g}, should be {relation} {limit:g}")
    return failed
