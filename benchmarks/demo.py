"""Hold `make demo` to its promises: clone the last commit, run it from nothing, check time and figures.

python -m benchmarks.demo
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from anyorder.data.corpora import open_corpus
from anyorder.data.prepare import split_of
from benchmarks.record import check, record

ROOT = Path(__file__).parent.parent
LIMITS = {
    "seconds": ("<=", 600.0),
    "left_to_right_bits_per_byte": ("<=", 1.65),
    "any_order_bits_per_byte": ("<=", 1.75),
    "share_of_filled_words_that_are_words": (">=", 0.95),
}
PASSAGES = 40


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "anyorder"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        first = timed(["make", "demo"], clone)
        second = timed(["make", "demo"], clone)
        report = json.loads((clone / "runs/demo/evaluation.json").read_text(encoding="utf-8"))
        bits = {result["name"]: result["bits_per_byte"] for result in report["texts"][0]["results"]}
        fill = f".venv/bin/anyorder fill runs/demo --held-out data/sotu --samples {PASSAGES} --json"
        filled = subprocess.run(
            [*fill.split(), "--order", "random", "--temperature", "0.3"],
            check=True,
            capture_output=True,
            text=True,
            cwd=clone,
        )
        share, words = share_of_words([json.loads(line) for line in filled.stdout.splitlines()])
    figures = {
        "seconds": first,
        "seconds_second_time": second,
        "left_to_right_bits_per_byte": bits["left to right"],
        "any_order_bits_per_byte": bits["any order"],
        "xz_bits_per_byte": bits["xz -9e"],
        "filled_words": words,
        "share_of_filled_words_that_are_words": share,
    }
    record("demo", figures)
    return 1 if check(figures, LIMITS) else 0


def timed(command: list[str], folder: Path) -> float:
    start = time.monotonic()
    subprocess.run(command, check=True, cwd=folder)
    return time.monotonic() - start


def share_of_words(filled: list[dict[str, list[dict[str, object]]]]) -> tuple[float, int]:
    """Share of the words which touch a written stretch that occur in the training documents, and their number."""
    known = set()
    for document in open_corpus(["sotu"]).documents():
        if split_of(document, 0.05) == "train":
            known |= set(words_of(document))
    found = []
    for passage in filled:
        text, written = "", []
        for piece in passage["pieces"]:
            start = len(text)
            text += str(piece["text"])
            if piece["written"]:
                written.append((start, len(text)))
        for match in re.finditer(r"[^\W\d_]+", text):
            if any(match.start() < end and start < match.end() for start, end in written):
                found.append(match.group().lower() in known)
    return sum(found) / len(found), len(found)


def words_of(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[^\W\d_]+", text)]


if __name__ == "__main__":
    sys.exit(main())
