"""What every benchmark writes beside its figures: the hardware and the commit."""

import json
import subprocess
from pathlib import Path
from typing import Any

from anyorder.bench.measure import machine

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def record(name: str, figures: dict[str, Any]) -> None:
    """Write benchmarks/results/NAME.json and print it."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    about = {"commit": commit.stdout.strip() or "unknown", **machine()}
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**about, **figures}, indent=1, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def check(figures: dict[str, Any], limits: dict[str, tuple[str, float]]) -> int:
    """Say which figures keep their limits, such as {"seconds": ("<=", 600)}; return how many do not."""
    failed = 0
    for name, (relation, limit) in limits.items():
        kept = figures[name] <= limit if relation == "<=" else figures[name] >= limit
        failed += not kept
        print(f"{'kept  ' if kept else 'FAILED'} {name} = {figures[name]:.4g}, should be {relation} {limit:g}")
    return failed
