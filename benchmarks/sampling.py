"""Hold sampling to its promises: speed against an encoder, tokens a pass, and blanks filled, on this machine.

python -m benchmarks.sampling [speed] # needs runs/demo and data/sotu, which make demo makes; speed alone does not
"""

import sys
from pathlib import Path
from typing import Any

from anyorder.bench.infilling import bench_infilling
from anyorder.bench.sampling import bench_sampling
from anyorder.bench.speculation import bench_speculation
from anyorder.data.shards import open_dataset
from anyorder.loading import load
from benchmarks.record import check, record

DATA, RUN = Path("data/sotu"), Path("runs/demo")
SPEED = {"times_faster_than_encoder": (">=", 40.0), "second_half_over_first": ("<=", 1.5)}
SPECULATION = {"least_tokens_a_pass": (">=", 1.5)}


def report(what: str, done: int, of: int) -> None:
    print(f"{done} of {of}: {what}", flush=True)


def main() -> int:
    speed: dict[str, Any] = bench_sampling(report)
    record("sampling", speed)
    if sys.argv[1:] == ["speed"]:
        return 1 if check(speed, SPEED) else 0
    model, _ = load(RUN)
    data = open_dataset(DATA)
    rows = bench_speculation(model, data, report)
    speculation = {"least_tokens_a_pass": min(row["tokens_a_pass"] for row in rows), "rows": rows}
    record("speculation", speculation)
    record("infilling", {"rows": bench_infilling(model, data, report)})
    return 1 if check(speed, SPEED) + check(speculation, SPECULATION) else 0


if __name__ == "__main__":
    sys.exit(main())
