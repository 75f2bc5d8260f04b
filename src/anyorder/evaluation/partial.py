"""What an evaluation has scored so far, on disk, so that an interrupted one goes on where it was."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from torch import Tensor, nn

from anyorder.processes import gather, rank_and_count

Scores = dict[int, list[float]]  # by number of the block: nats of its columns


class Partial:
    """Scores in KEY.RANK.jsonl, one line a block; every process reads all files and writes its own."""

    def __init__(self, folder: Path | None, key: str):
        self.folder, self.key, self.rank = folder, key, rank_and_count()[0]
        self.file: IO[str] | None = None
        self.found: dict[str, Scores] = {}
        for path in self._paths():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    name, number, nats = json.loads(line)
                    self.found.setdefault(name, {})[int(number)] = [float(n) for n in nats]
                except (ValueError, TypeError):
                    continue  # a line cut short by a kill
        gather(None)  # nobody writes before all have read, so that all agree on what is missing

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.key}.*.jsonl")) if self.folder is not None else []

    def __len__(self) -> int:
        return sum(map(len, self.found.values()))

    def add(self, name: str, scores: Scores) -> None:
        """Keep the scores of some blocks, on disk too where the folder can be written."""
        self.found.setdefault(name, {}).update(scores)
        if self.folder is None:
            return
        try:
            if self.file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.file = (self.folder / f"{self.key}.{self.rank}.jsonl").open("a", encoding="utf-8")
                self.file.write("\n")  # behind a line that a kill cut short
            self.file.writelines(json.dumps([name, number, nats]) + "\n" for number, nats in scores.items())
            self.file.flush()
        except OSError as error:
            warnings.warn(
                f"{self.folder} cannot be written ({error.strerror}); if interrupted, this evaluation starts again",
                stacklevel=2,
            )
            self.folder = None

    def complete(
        self,
        name: str,
        numbers: list[int],
        work: Callable[[list[int]], Iterator[Scores]],
        advance: Callable[[list[int], int], None],
    ) -> Scores:
        """Have `work` score those of `numbers` that are missing, this process its share; collect what all have.

        `advance` is told what has been scored, and in how many processes as much.
        """
        before = self.found.get(name, {})
        advance([number for number in numbers if number in before], 1)
        left = [number for number in numbers if number not in before]
        rank, count = rank_and_count()
        for scores in work(left[rank::count]):
            self.add(name, scores)
            advance(list(scores), count)
        everything: Scores = {}
        for found in gather(self.found.get(name, {})):
            everything |= found
        return {number: everything[number] for number in numbers}

    def remove(self) -> None:
        """Forget it: the figures have been reported."""
        gather(None)  # nobody reads a file any more
        if self.file is not None:
            self.file.close()
        for path in self._paths():
            path.unlink(missing_ok=True)
        if self.folder is not None and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def key_of(model: nn.Module, *parts: object) -> str:
    """Name what an evaluation depends on: the weights, and everything else by its text."""
    digest = hashlib.sha256(repr(parts).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + _bytes(tensor))
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().float().contiguous().numpy().tobytes()
