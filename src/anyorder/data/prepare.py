"""Corpus to shards: the same bytes on every machine and for any number of workers, and all of it or nothing."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from anyorder.data.corpora import Corpus
from anyorder.data.shards import FORMAT, SPLITS, ShardWriter, Split, content_hash, open_dataset
from anyorder.data.tokenizer import Tokenizer, make_tokenizer
from anyorder.errors import InputError
from anyorder.files import new_folder

WINDOW = 2**19  # characters encoded by one worker at a time; bounds memory, changes no result
Report = Callable[[str, int], None]  # the phase, and how many bytes of text have passed in it


def prepare(
    corpus: Corpus, out: Path, tokenizer: str, validation: float = 0.05, workers: int = 2, report: Report | None = None
) -> dict[str, Any]:
    """Write tokenizer, shards and manifest to the folder `out`; return the manifest."""
    if not 0 < validation < 1:
        raise InputError(f"the validation share is {validation}; accepted: more than 0 and less than 1")
    if workers < 1:
        raise InputError(f"workers is {workers}; accepted: 1 or more")
    say = report or (lambda phase, size: None)
    request = {**corpus.describe(), "tokenizer": _tokenizer_name(tokenizer), "validation": validation}
    if out.resolve() == Path.cwd():
        raise InputError(f"--out {out} is the folder this runs in; accepted: the name of a folder to make")
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
    if out.exists():
        return _already(out, request)
    with new_folder(out, "nothing was left behind") as folder, _tokenizer_threads(workers > 1):
        built = make_tokenizer(tokenizer, _training_texts(corpus, validation, say))
        dtype = np.dtype("<u2" if built.vocabulary <= 2**16 else "<u4")
        writers = {split: ShardWriter(folder, split, dtype) for split in SPLITS}
        empty = _encode_all(corpus, built, writers, validation, workers, say)
        splits = {split: writer.finish() for split, writer in writers.items()}
        if not sum(s["documents"] for s in splits.values()):
            raise InputError(f"the source has no text ({empty} empty documents); accepted: at least one document")
        (folder / "tokenizer.json").write_text(built.to_json(), encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "request": request,
            "tokenizer": {"sha256": built.sha256, "vocabulary": built.vocabulary, "end_of_text": built.end_of_text},
            "dtype": dtype.str,
            "empty_documents_skipped": empty,
            "splits": splits,
            "content_sha256": content_hash(splits, built.sha256),
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def split_of(document: str, validation: float) -> Split:
    """Assign a document by its own hash: no list to keep, and the same everywhere."""
    number = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")
    return "validation" if number < validation * 2**64 else "train"


def _already(out: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Accept data that the same request prepared before, refuse any other."""
    manifest = open_dataset(out).manifest
    for key in sorted(request.keys() | manifest["request"].keys()):
        if manifest["request"].get(key) != request.get(key):
            raise InputError(
                f"{out} was prepared with other {key} than now asked for; accepted: the same, or another --out"
            )
    return manifest


def _tokenizer_name(spec: str) -> str:
    """Name a tokenizer file by what it holds, not by where it lies."""
    path = Path(spec)
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" if path.is_file() else spec


def _training_texts(corpus: Corpus, validation: float, say: Report) -> Iterator[str]:
    """Yield the documents of the training split alone: the tokenizer must not see the held-out text either."""
    passed = 0
    for document in corpus.documents():
        passed += len(document.encode())
        say("learning the tokenizer", passed)
        if document and split_of(document, validation) == "train":
            yield document


def _encode_all(
    corpus: Corpus,
    tokenizer: Tokenizer,
    writers: dict[Split, ShardWriter],
    validation: float,
    workers: int,
    say: Report,
) -> int:
    """Encode in parallel, write in order; return how many empty documents there were."""
    empty = passed = 0
    pending: deque[tuple[list[str], Future[list[np.ndarray]]]] = deque()

    def drain() -> None:
        nonlocal passed
        documents, future = pending.popleft()
        for document, tokens in zip(documents, future.result(), strict=True):
            size = len(document.encode())
            writers[split_of(document, validation)].append(tokens, size)
            passed += size
        say("encoding", passed)

    with ThreadPoolExecutor(workers) as pool, _tokenizer_threads(False):  # the pool's threads are the only ones
        for window in _windows(corpus.documents()):
            documents = [document for document in window if document]
            empty += len(window) - len(documents)
            pending.append((documents, pool.submit(tokenizer.encode_documents, documents)))
            if len(pending) > 2 * workers:
                drain()
        while pending:
            drain()
    return empty


def _windows(documents: Iterator[str]) -> Iterator[list[str]]:
    window: list[str] = []
    size = 0
    for document in documents:
        window.append(document)
        size += len(document)
        if size >= WINDOW:
            yield window
            window, size = [], 0
    if window:
        yield window


@contextmanager
def _tokenizer_threads(on: bool) -> Iterator[None]:
    """Set whether the tokenizers library starts threads of its own, which it reads from the environment."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
