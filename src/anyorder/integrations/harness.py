"""Models of this package under lm-evaluation-harness: `lm_eval --model anyorder --model_args run=RUN --tasks ...`.

The harness finds models by name among those it has imported, so the command `lm_eval` that this package installs
registers this one and then hands over to the harness's own.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyorder import orders
from anyorder.checkpoint import Weights
from anyorder.data.batches import generator_for
from anyorder.errors import InputError
from anyorder.evaluation.conditional import read_conditional
from anyorder.evaluation.marked import Marked, mark_after, score_marked, whole_text
from anyorder.loading import load
from anyorder.precision import pick_device
from anyorder.sampling.constraints import from_mask
from anyorder.sampling.fill import Manner, write
from anyorder.sampling.filters import Filters
from anyorder.sampling.writing import Writing

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ImportError:  # the command says so
    LM = object

    def register_model(*names: str) -> Any:
        return lambda kind: kind


MOST_TOKENS = 256  # of a continuation, where the task does not say


@register_model("anyorder")
class AnyOrder(LM):
    """run=RUN, weights=ema|raw, order=left_to_right (in which a continuation is scored), seed, batch_size."""

    def __init__(
        self,
        run: str,
        weights: Weights = "ema",
        order: str = "left_to_right",
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        self.batch_size = 1 if batch_size is None or batch_size == "auto" else int(batch_size)
        if self.batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; accepted: 1 or more")
        self.distribution, self.order, self.seed = orders.parse(order), order, seed
        self.model, tokenizer = load(Path(run), weights)
        if tokenizer is None:
            raise InputError(f"{run} has no tokenizer; accepted: a run with one")
        self.text_tokens = tokenizer
        # the harness asks for cuda:0 by default, on machines without one too
        absent = device is None or (device.startswith("cuda") and not torch.cuda.is_available())
        self._device = pick_device() if absent else torch.device(str(device))
        self.model.to(self._device)

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokens.sha256

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each continuation given its context: the sum, and whether every token was the likeliest."""
        pairs = [request.args for request in requests]
        marked = [self._fitting(mark_after(context, after, self.text_tokens)) for context, after in pairs]
        order = sorted(range(len(marked)), key=lambda number: -len(marked[number].tokens))
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(order), desc="loglikelihood", disable=disable_tqdm) as bar:
            for start in range(0, len(order), self.batch_size):
                numbers = order[start : start + self.batch_size]
                for number, score in zip(numbers, self._score([marked[n] for n in numbers], numbers), strict=True):
                    found[number] = score
                    self.cache_hook.add_partial("loglikelihood", requests[number].args, score)
                bar.update(len(numbers))
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows where they are longer than the model, each token once."""
        found = []
        for number, request in enumerate(tqdm(requests, desc="loglikelihood_rolling", disable=disable_tqdm)):
            marked = whole_text(request.args[0], self.text_tokens)
            scores = score_marked(self.model, marked, self.order, generator_for(self.seed, "rolling", number))
            found.append(float(scores.double().sum()))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Continue each context left to right until a stopping sequence; greedily unless the task wants samples."""
        found = []
        for number, request in enumerate(tqdm(requests, desc="generate_until", disable=disable_tqdm)):
            context, options = request.args
            found.append(self._continue(context, dict(options), generator_for(self.seed, "continue", number)))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _fitting(self, marked: Marked) -> Marked:
        """Drop the front of a text that is longer than the model."""
        most = self.model.config.positions
        if len(marked.tokens) <= most:
            return marked
        if int(marked.query.sum()) > most:
            raise InputError(
                f"a continuation has {int(marked.query.sum())} tokens; accepted: at most {most}, the model's positions"
            )
        return Marked(marked.text, marked.tokens[-most:], marked.query[-most:], marked.given[-most:])

    @torch.no_grad()
    def _score(self, batch: list[Marked], numbers: list[int]) -> list[tuple[float, bool]]:
        """Score texts of different lengths in one pass: what stands behind a shorter one is neither asked nor given."""
        length = max(len(marked.tokens) for marked in batch)

        def stacked(parts: list[Tensor]) -> Tensor:
            rows = [torch.nn.functional.pad(part, (0, length - len(part))) for part in parts]
            return torch.stack(rows).to(self._device)

        tokens, query, given = (
            stacked([getattr(marked, part) for marked in batch]) for part in ("tokens", "query", "given")
        )
        drawn = []
        for marked, number in zip(batch, numbers, strict=True):
            its = len(marked.tokens)  # an order of the text's own length, whatever it is batched with
            order = self.distribution.sample(1, its, generator_for(self.seed, "score", number), 1.0)
            drawn.append(torch.cat((order[0], torch.arange(its, length))))
        lengths = torch.tensor([len(marked.tokens) for marked in batch], device=self._device)
        order = torch.stack(drawn)
        asked, positions, _ = read_conditional(self.model, tokens, query, given, order, lengths=lengths)
        wanted, logits = tokens.gather(1, positions), asked.table(positions.shape)  # (B, n), (B, n, V)
        logprobs = logits.float().log_softmax(-1)
        scores = logprobs.gather(2, wanted[..., None])[..., 0].double()  # (B, n)
        greedy = logprobs.argmax(-1) == wanted
        counts = query.sum(1).tolist()
        return [
            (float(its[:count].sum()), bool(likeliest[:count].all()))
            for its, likeliest, count in zip(scores, greedy, counts, strict=True)
        ]

    def _continue(self, context: str, options: dict[str, Any], generator: torch.Generator) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        positions = self.model.config.positions
        most = min(int(options.get("max_gen_toks", MOST_TOKENS)), positions - 1)
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        known = torch.tensor(self.text_tokens.encode(context), dtype=torch.long)
        known = known[max(0, len(known) - (positions - most)) :]
        text = torch.cat((known, torch.zeros(most, dtype=torch.long)))[None].to(self._device)  # (1, T)
        blanks = torch.arange(text.shape[1], device=text.device)[None] >= len(known)
        allowed = torch.arange(self.model.config.vocabulary) < self.text_tokens.vocabulary
        constraint = from_mask(allowed.to(self._device), (), (*text.shape, len(allowed)))
        writing = Writing(self.model, text, blanks, None, Filters(temperature), constraint, generator)
        written: list[int] = []
        for reveal in write(writing, Manner("left_to_right")):
            token = int(reveal.tokens)
            if token == self.text_tokens.end_of_text:
                break
            written.append(token)
            said = self.text_tokens.decode(written)
            if any(stop in said for stop in stops):
                return said[: min(said.index(stop) for stop in stops if stop in said)]
        return self.text_tokens.decode(written)


def main() -> int:
    """Run lm_eval with this model among those it knows."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        print("lm_eval: error: lm-evaluation-harness is not installed: pip install anyorder[eval]", file=sys.stderr)
        return 2
    try:
        cli_evaluate()
    except InputError as error:
        print(f"lm_eval: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
