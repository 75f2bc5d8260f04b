"""Language models that read and write text in any order."""

from anyorder import orders
from anyorder.errors import InputError
from anyorder.evaluation.conditional import logprob
from anyorder.loading import load
from anyorder.objectives import order_nll
from anyorder.sampling.constraints import Choice
from anyorder.sampling.fill import Manner, Written, fill, generate, write
from anyorder.sampling.filters import Filters
from anyorder.sampling.writing import Reveal, Writing

__all__ = [
    "Choice",
    "Filters",
    "InputError",
    "Manner",
    "Reveal",
    "Writing",
    "Written",
    "fill",
    "generate",
    "load",
    "logprob",
    "order_nll",
    "orders",
    "write",
]
__version__ = "0.1.0"
