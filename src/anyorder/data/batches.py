"""Which tokens form step s: a pure function of (seed, step). There is no loader state to save."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from anyorder.data.shards import TokenStream


def generator_for(*key: int | str) -> torch.Generator:
    """Make the generator that belongs to a key such as (seed, "orders", step)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass
class Batches:
    """Cut a stream into chunks and deal them out: every chunk once an epoch, each epoch in an order of its own."""

    stream: TokenStream
    length: int
    batch_size: int
    seed: int
    _epochs: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def count(self) -> int:
        """Number of whole chunks."""
        return len(self.stream) // self.length

    def rows(self, step: int) -> Tensor:
        """Read the global batch of a step: (B, T)."""
        slots = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        numbers = np.array([self._epoch(int(slot) // self.count)[int(slot) % self.count] for slot in slots])
        return torch.from_numpy(self.stream.chunks(numbers, self.length))

    def _epoch(self, number: int) -> np.ndarray:
        if number not in self._epochs:
            permutation = torch.randperm(self.count, generator=generator_for(self.seed, "epoch", number))
            # a batch touches a few neighbouring epochs at most, so only the newest are kept
            self._epochs = {n: p for n, p in self._epochs.items() if n >= number - 1} | {number: permutation.numpy()}
        return self._epochs[number]


def spread_chunks(stream: TokenStream, length: int, limit: int | None = None) -> Tensor:
    """Read chunks evenly spread over a stream, all of them without a limit: (N, T)."""
    count = len(stream) // length
    chosen = np.arange(count) if limit is None or limit >= count else np.arange(limit) * count // limit
    return torch.from_numpy(stream.chunks(chosen, length))
