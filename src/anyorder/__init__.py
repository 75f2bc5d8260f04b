"""Language models that read and write text in any order."""

from anyorder import orders
from anyorder.errors import InputError
from anyorder.evaluation.conditional import logprob
from anyorder.loading import load
from anyorder.objectives import order_nll
from anyorder.sampling.fill import Filled, fill

__all__ = ["Filled", "InputError", "fill", "load", "logprob", "order_nll", "orders"]
__version__ = "0.1.0"
