"""Text cut into the sequences that are scored: all of it, the last block shorter than the others."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyorder.data.shards import TokenStream


@dataclass(frozen=True)
class Blocks:
    """`total` tokens in blocks of `length`; the hash is of all tokens, so that two people can compare one number."""

    read: Callable[[int, int], np.ndarray]  # first token, how many -> that many tokens
    total: int
    length: int
    sha256: str

    def __len__(self) -> int:
        return -(-self.total // self.length)

    def size(self, number: int) -> int:
        return min(self.length, self.total - number * self.length)

    def rows(self, numbers: list[int]) -> Tensor:
        """Read blocks of one size: (B, T)."""
        parts = [self.read(number * self.length, self.size(number)) for number in numbers]
        return torch.from_numpy(np.stack(parts).astype(np.int64))

    def spread(self, limit: int | None) -> list[int]:
        """Number all blocks, or `limit` of them evenly spread."""
        count = len(self)
        return list(range(count)) if limit is None or limit >= count else [i * count // limit for i in range(limit)]


def of_stream(stream: TokenStream, length: int, sha256: str) -> Blocks:
    return Blocks(stream.read, len(stream), length, sha256)


def contiguous(documents: Iterable[np.ndarray], length: int) -> Blocks:
    """Cut what follows on each other, one document after the other."""
    return _of_array(np.concatenate([np.empty(0, np.uint32), *documents]), length)


def wrapped(documents: Iterable[np.ndarray], length: int, mark: int) -> Blocks:
    """Cut pieces of length - 2 and put `mark` before and after each."""
    tokens = np.concatenate([np.empty(0, np.uint32), *documents])
    pieces = [tokens[start : start + length - 2] for start in range(0, len(tokens), length - 2)]
    edge = np.array([mark], np.uint32)
    return _of_array(
        np.concatenate([np.empty(0, np.uint32), *(p for piece in pieces for p in (edge, piece, edge))]), length
    )


def _of_array(tokens: np.ndarray, length: int) -> Blocks:
    digest = hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
    return Blocks(lambda start, count: tokens[start : start + count], len(tokens), length, digest)
