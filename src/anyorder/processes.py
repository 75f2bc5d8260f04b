"""Several processes that share a piece of work, as torchrun starts them."""

import atexit
import os
from typing import Any

import torch
from torch import distributed


def rank_and_count() -> tuple[int, int]:
    """Say which of how many processes this is, joining them on the first call."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return 0, 1
    if not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(distributed.destroy_process_group)  # else its threads abort a process that ends well
    return distributed.get_rank(), distributed.get_world_size()


def gather(found: Any) -> list[Any]:
    """Collect what each process found, in the order of their ranks, in every process."""
    _, count = rank_and_count()
    if count == 1:
        return [found]
    everything: list[Any] = [None] * count
    distributed.all_gather_object(everything, found)
    return everything
