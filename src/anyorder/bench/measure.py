"""What every benchmark needs: the machine, its ceilings, and ways timed in turn."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Report = Callable[[str, int, int], None]  # what is measured, how much is done, of how much


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at best."""

    fp32_gflops: float
    bf16_gflops: float
    bandwidth_gb: float  # of reading memory, in 10^9 bytes a second


def measure_ceilings(size: int = 2048, repeats: int = 5) -> Ceilings:
    """Multiply square matrices in each number type, and add up a buffer that no cache holds."""
    rates = []
    for number_type in (torch.float32, torch.bfloat16):
        a, b = torch.ones(2, size, size, dtype=number_type)
        seconds = min(_seconds(lambda a=a, b=b: a @ b) for _ in range(repeats))  # type: ignore[misc]
        rates.append(2 * size**3 / seconds / 1e9)
    buffer = torch.ones(2**28)
    seconds = min(_seconds(buffer.sum) for _ in range(repeats))
    return Ceilings(rates[0], rates[1], buffer.nbytes / seconds / 1e9)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(ways: dict[str, Callable[[], object]], repeats: int, report: Report) -> dict[str, list[float]]:
    """Time several ways one after the other, again and again, so that a slow minute falls on all of them."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for number, (name, way) in enumerate(ways.items()):
            report(name, repeat * len(ways) + number, repeats * len(ways))
            taken[name].append(_seconds(way))
    return taken


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Divide repeat by repeat, and take the median."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
