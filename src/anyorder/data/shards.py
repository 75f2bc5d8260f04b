"""Prepared data on disk: token shards that are memory-mapped, and the manifest that says what they hold."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from anyorder.data.tokenizer import Tokenizer, load_tokenizer
from anyorder.errors import InputError
from anyorder.files import file_sha256

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
FORMAT = 1
DTYPES = ("<u2", "<u4")
TOKENS_PER_SHARD = 2**27
ACCEPTED = "accepted: a folder written by anyorder prepare"


class ShardWriter:
    """Append documents' tokens to numbered shards of one split, counting and hashing as they pass."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype, tokens_per_shard: int = TOKENS_PER_SHARD):
        self.folder, self.split, self.dtype, self.capacity = folder, split, dtype, tokens_per_shard
        self.documents = self.tokens = self.bytes = 0
        self.shards: list[dict[str, Any]] = []
        self.file: Any = None

    def append(self, tokens: np.ndarray, size: int) -> None:
        """Add one document of `size` bytes of text."""
        self.documents += 1
        self.tokens += len(tokens)
        self.bytes += size
        tokens = tokens.astype(self.dtype)
        while len(tokens):
            if self.file is None:
                self._open()
            room = self.capacity - self.shards[-1]["tokens"]
            part, tokens = tokens[:room].tobytes(), tokens[room:]
            self.file.write(part)
            self.hash.update(part)
            self.shards[-1]["tokens"] += len(part) // self.dtype.itemsize
            if self.shards[-1]["tokens"] == self.capacity:
                self._close()

    def _open(self) -> None:
        name = f"{self.split}-{len(self.shards):05d}.bin"
        self.shards.append({"file": name, "tokens": 0, "sha256": ""})
        self.file = (self.folder / name).open("wb")
        self.hash = hashlib.sha256()

    def _close(self) -> None:
        self.file.close()
        self.file = None
        self.shards[-1]["sha256"] = self.hash.hexdigest()

    def finish(self) -> dict[str, Any]:
        """Close the last shard and describe the split."""
        if self.file is not None:
            self._close()
        left_over = {str(2**power): self.tokens % 2**power for power in range(4, 14)}
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "left_over_by_chunk_length": left_over,  # the last partial chunk: the only tokens no one trains on
            "shards": self.shards,
        }


@dataclass(frozen=True)
class TokenStream:
    """All tokens of one split, cut into chunks of equal length; chunk i holds tokens i * length onwards."""

    shards: tuple[np.ndarray, ...]
    starts: np.ndarray  # (shards + 1,) where each shard begins in the stream, and where the last one ends
    vocabulary: int

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Copy tokens start .. start + count, across shards where need be."""
        parts = []
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while count > 0:
            inside = start - int(self.starts[shard])
            part = self.shards[shard][inside : inside + count]
            parts.append(part)
            start, count, shard = start + len(part), count - len(part), shard + 1
        tokens = np.concatenate(parts).astype(np.int64)
        if len(tokens) and tokens.max() >= self.vocabulary:
            raise InputError(
                f"the data hold token {tokens.max()} where the vocabulary has {self.vocabulary}: a shard is damaged; "
                "prepare the data again"
            )
        return tokens

    def chunks(self, numbers: np.ndarray, length: int) -> np.ndarray:
        """Read the chunks with these numbers: (B,) -> (B, length)."""
        return np.stack([self.read(int(number) * length, length) for number in numbers])


@dataclass(frozen=True)
class Dataset:
    """A folder that `anyorder prepare` wrote."""

    folder: Path
    manifest: dict[str, Any]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / "tokenizer.json")

    @property
    def tokenizer_sha256(self) -> str:
        return self.manifest["tokenizer"]["sha256"]

    @property
    def content_sha256(self) -> str:
        return self.manifest["content_sha256"]

    def split(self, name: Split, length: int) -> TokenStream:
        """Map one split into memory, refusing a damaged one and one without a single chunk of `length` tokens."""
        dtype = np.dtype(self.manifest["dtype"])
        described = self.manifest["splits"][name]["shards"]
        for shard in described:
            if file_sha256(self.folder / shard["file"]) != shard["sha256"]:
                raise InputError(f"{self.folder / shard['file']} is not as it was written; prepare the data again")
        shards = tuple(np.memmap(self.folder / s["file"], dtype=dtype, mode="r") for s in described)
        starts = np.cumsum([0, *(len(s) for s in shards)])
        stream = TokenStream(shards, starts, self.manifest["tokenizer"]["vocabulary"])
        if len(stream) < length:
            raise InputError(
                f"the {name} split of {self.folder} has {len(stream)} tokens, less than one chunk of {length}; "
                "prepare more text, or choose another --validation share or a smaller --cut-text"
            )
        return stream


def content_hash(splits: dict[Split, Any], tokenizer_sha256: str) -> str:
    """Hash what the shards' hashes say, so that two people can compare one number."""
    lines = [tokenizer_sha256, *(f"{s['file']} {s['sha256']}" for name in SPLITS for s in splits[name]["shards"])]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def open_dataset(folder: Path) -> Dataset:
    """Open prepared data, checking that every file is there in its full size."""
    path = folder / "manifest.json"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {what} and should be a data folder; {ACCEPTED}")
    if not path.is_file():
        raise InputError(f"{folder} has no manifest.json; {ACCEPTED}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise InputError(f"{folder} is of data format {manifest['format']}; accepted: {FORMAT}")
        if manifest["dtype"] not in DTYPES:
            raise InputError(f"{path} has dtype {manifest['dtype']!r}; accepted: {', '.join(DTYPES)}")
        size = np.dtype(manifest["dtype"]).itemsize
        _demand(manifest, request=dict, content_sha256=str)
        _demand(manifest["tokenizer"], sha256=str, vocabulary=int)
        for split in SPLITS:
            described = manifest["splits"][split]
            _demand(described, documents=int, tokens=int, bytes=int)
            for shard in described["shards"]:
                file = folder / shard["file"]
                _demand(shard, sha256=str)
                if not file.is_file() or file.stat().st_size != shard["tokens"] * size:
                    raise InputError(f"{file} is missing or not of its recorded size; prepare the data again")
        if load_tokenizer(folder / "tokenizer.json").sha256 != manifest["tokenizer"]["sha256"]:
            raise InputError(f"{folder}/tokenizer.json is not the tokenizer these data were prepared with")
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a data manifest ({type(error).__name__}: {error}); {ACCEPTED}") from None
    return Dataset(folder, manifest)


def _demand(fields: dict[str, Any], **kinds: type) -> None:
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise TypeError(f"{name} is {fields[name]!r:.40}")
