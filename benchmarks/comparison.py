"""Every cell of the comparison, trained on the same tokens with the same seed and scored on the same held-out text.

python -m benchmarks.comparison       # needs data/sotu, which make demo makes; goes on where it was stopped
"""

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, record

DATA, RUNS = Path("data/sotu"), Path("runs/comparison")
TABLE = ROOT / "docs/tables/comparison.md"
INJECTIONS = ("add", "layer", "adaln", "rotary", "add+rotary", "layer+rotary", "adaln+rotary")
CELLS = (
    *(("decoder", injection, "left_to_right") for injection in ("none", "rotary")),
    *(("decoder", injection, "random") for injection in INJECTIONS),
    *(("two_stream", injection, "random") for injection in ("none", "rotary")),
    *(("encoder", injection, "left_to_right") for injection in ("none", "rotary")),
    *(("encoder", injection, "random") for injection in ("none", "rotary")),
    *(("sedd", injection, "random") for injection in ("none", "rotary")),
)
LIMIT, ENSEMBLE = 400, 8
COLUMNS = {
    "left to right": "left to right",
    "any order": "any order",
    f"ensemble of {ENSEMBLE}": f"ensemble of {ENSEMBLE}",
    "masked-diffusion bound": "masked-diffusion bound",
    "score-entropy bound": "score-entropy bound",
}


def main() -> int:
    rows = []
    for number, (family, injection, orders) in enumerate(CELLS, 1):
        print(f"{number} of {len(CELLS)}: {family}, {injection}, {orders}", flush=True)
        rows.append({"family": family, "injection": injection, "orders": orders} | cell(family, injection, orders))
        write_table(rows)
    record("comparison", {"preset": "tiny", "sequences": LIMIT, "cells": rows})
    return 0


def cell(family: str, injection: str, orders: str) -> dict[str, Any]:
    """Train one model and score it."""
    run = RUNS / f"{family}-{injection}-{orders}"
    anyorder(
        *("train", "tiny", "--data", str(DATA), "--out", str(run)),
        *("--family", family, "--injection", injection, "--orders", orders),
    )
    report = run / "report.json"
    if not report.exists():
        any_order = (family, injection) != ("decoder", "none")
        wanted = ["--bound"] if any_order else []
        if any_order and family in ("decoder", "two_stream"):
            wanted += ["--ensemble", str(ENSEMBLE)]
        evaluate = ["evaluate", str(run), "--data", str(DATA), "--limit", str(LIMIT), "--json", str(report)]
        anyorder(*evaluate, *wanted)
    found = {r["name"]: r for r in json.loads(report.read_text(encoding="utf-8"))["texts"][0]["results"]}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    figures = {name: found[name]["nats_per_token"] for name in COLUMNS if name in found}
    errors = {f"{name}_error": found[name]["nats_error"] for name in figures}
    return {"tokens_per_second": statistics.median(speeds), **figures, **errors}


def anyorder(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "anyorder.cli", *arguments], check=True)


def write_table(rows: list[dict[str, Any]]) -> None:
    """Write held-out perplexity, cell by cell."""
    head = ["family", "injection", "trained on", *(f"{name}" for name in COLUMNS.values()), "tokens/s"]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for row in rows:
        figures = [f"{math.exp(row[name]):.1f}" if name in row else "" for name in COLUMNS]
        cells = [row["family"], f"`{row['injection']}`", f"`{row['orders']}`", *figures]
        lines.append(" | ".join([*cells, f"{row['tokens_per_second']:,.0f}"]))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(f"| {line} |" for line in lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
