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

from anyorder.bench.families import bench_families
from benchmarks.record import ROOT, record

DATA, RUNS = Path("data/sotu"), Path("runs/comparison")
TABLES = ROOT / "docs/tables"
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
COSTS = (  # head of the column, what is computed, what is counted
    ("parameters", "parameters", None),
    ("operations a token in training", "training_operations_a_token", "counted_training_operations_a_token"),
    ("tokens with a gradient", "share_of_tokens_with_gradient", "counted_share_of_tokens_with_gradient"),
    ("passes to score an order", "passes_to_score_an_order", "counted_passes_to_score"),
    ("slots to score an order", "slots_to_score_an_order", "counted_slots_to_score"),
    ("passes to generate", "passes_to_generate", "counted_passes_to_generate"),
    ("slots to generate", "slots_to_generate", "counted_slots_to_generate"),
)
COLUMNS = {
    "left to right": "left to right",
    "any order": "any order",
    f"ensemble of {ENSEMBLE}": f"ensemble of {ENSEMBLE}",
    "masked-diffusion bound": "masked-diffusion bound",
    "score-entropy bound": "score-entropy bound",
}


def main() -> int:
    write_families()
    rows: list[dict[str, Any]] = []
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
    lines = [head]
    for row in rows:
        figures = [f"{math.exp(row[name]):.1f}" if name in row else "" for name in COLUMNS]
        cells = [row["family"], f"`{row['injection']}`", f"`{row['orders']}`", *figures]
        lines.append([*cells, f"{row['tokens_per_second']:,.0f}"])
    write_markdown("comparison", lines)


def write_families() -> None:
    """Write what each family costs: computed, and in brackets counted."""
    rows = bench_families(lambda what, done, of: None, "tiny")
    lines = [["model", *(name for name, _, _ in COSTS), "conditionals of 4 positions"]]
    for row in rows:
        pairs = [
            f"{row[ours]:,.4g} ({row[counted]:,.4g})" if counted else f"{row[ours]:,}" for _, ours, counted in COSTS
        ]
        lines.append([row["model"], *pairs, str(row["conditionals_of_4_positions"])])
    write_markdown("families", lines)


def write_markdown(name: str, lines: list[list[str]]) -> None:
    TABLES.mkdir(exist_ok=True)
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    (TABLES / f"{name}.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
