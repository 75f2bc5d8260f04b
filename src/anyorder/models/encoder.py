"""The encoder: full attention over a text of which some positions are hidden; with the noise as input, SEDD's."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyorder.config import ModelConfig
from anyorder.models.blocks import Modulation
from anyorder.models.context import Asked, Context
from anyorder.models.injection import Injection, Shape, Together, make_injection
from anyorder.models.model import LanguageModel

LEAST = 1e-3  # log-linear noise: at time t a token is hidden with probability (1 - LEAST) t
SLOTS = 2**15  # slots that one pass of a context may hold


def noise(time: Tensor) -> Tensor:
    """sigma(t) = -log(1 - (1 - LEAST) t): the log-linear schedule; exp(-sigma) is the share that stays visible."""
    return -torch.log1p(-(1 - LEAST) * time)


class Noise(nn.Module):
    """Shift, scale and gate every block by the noise, as SEDD does: from sinusoids of sigma by linear maps."""

    def __init__(self, config: ModelConfig, condition: int = 128):
        super().__init__()
        self.condition = condition
        self.first = nn.Linear(2 * condition, condition)
        self.second = nn.Linear(condition, condition)
        self.block_maps = nn.ModuleList(nn.Linear(condition, 6 * config.width) for _ in range(config.layers))
        self.final_map = nn.Linear(condition, 2 * config.width)

    def finish_init(self) -> None:
        """Let every block pass its input on at first, as published."""
        for linear in (*self.block_maps, self.final_map):
            assert isinstance(linear, nn.Linear)
            nn.init.zeros_(linear.weight)

    def at(self, sigma: Tensor) -> "AtNoise":
        """Prepare the modulation for noise sigma (B,)."""
        frequency = torch.exp(-math.log(10_000) * torch.arange(self.condition, device=sigma.device) / self.condition)
        angle = sigma[:, None] * frequency
        wave = torch.cat((angle.cos(), angle.sin()), 1).to(self.first.weight.dtype)
        signal = functional.silu(self.second(functional.silu(self.first(wave))))  # (B, D)
        return AtNoise([linear(signal)[:, None] for linear in self.block_maps], self.final_map(signal)[:, None])


class AtNoise(Injection):
    """The modulation of every slot of a row by that row's noise."""

    def __init__(self, blocks: list[Tensor], final: Tensor):
        super().__init__()
        self.of_block, self.final = blocks, final

    def at_block(self, layer: int, x: Tensor, target: Tensor) -> tuple[Tensor, tuple[Modulation, Modulation] | None]:
        parts = [part.expand_as(x) for part in self.of_block[layer].chunk(6, -1)]
        return x, ((parts[0], parts[1], parts[2]), (parts[3], parts[4], parts[5]))

    def at_end(self, target: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.final.chunk(2, -1)
        return shift, scale


class Encoder(LanguageModel):
    """Predict hidden positions: model(tokens (B, T), visible (B, T) bool) -> logits (B, T, V), in natural positions.

    A hidden position holds the mask embedding. With `sedd` the blocks are told the noise.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config, make_injection(config.injection, Shape.of(config)) or Injection())
        self.mask_embedding = nn.Parameter(torch.zeros(config.width))
        self.noise = Noise(config) if config.family == "sedd" else None

    def initialise(self, generator: torch.Generator) -> "Encoder":
        super().initialise(generator)
        if self.noise is not None:
            self.noise.finish_init()
        return self

    def hidden(
        self, tokens: Tensor, visible: Tensor, exists: Tensor | None = None, sigma: Tensor | None = None
    ) -> Tensor:  # (B, T) -> (B, T, C)
        """Compute what the head reads. Positions that do not exist (B, T) are not seen.

        Without a noise sigma (B,), SEDD's is that of the share of positions that are hidden.
        """
        own = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand_as(tokens)
        embedded = torch.where(visible[..., None], self.token_embedding(tokens), self.mask_embedding)
        mask = None if exists is None else exists[:, None, None]  # (B, 1, 1, T)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, mask)

        injection = self.injection
        if self.noise is not None:
            counted = visible if exists is None else visible & exists
            there = tokens.shape[1] if exists is None else exists.sum(1)
            at = self.noise.at(noise(1 - counted.sum(1) / there) if sigma is None else sigma)
            injection = Together([at, self.injection])
        return self.run_blocks(
            embedded + self.position_embedding(own), own, own - 1, lambda layer: attend, injection=injection
        )

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        self.check_text(tokens)
        return self.head(self.hidden(tokens, visible))

    def log_scores(self, tokens: Tensor, visible: Tensor, time: Tensor) -> Tensor:  # (B, T), (B,) -> (B, T, V)
        """SEDD's log s(x)_y, an estimate of log p(x with y at a hidden position) - log p(x), at time (B,)."""
        self.check_text(tokens)
        sigma = noise(time)
        logits = self.head(self.hidden(tokens, visible, None, sigma)).float()
        return logits - log_ratio(sigma)[:, None, None] - math.log(self.config.vocabulary)

    def along(self, tokens: Tensor, order: Tensor) -> Tensor:
        """One pass for each position of the order; no gradient."""
        self.check_order(tokens, order)
        context = EncoderContext(self, *tokens.shape)
        return context.chain(order, tokens.gather(1, order))[0].table(order.shape)


def log_ratio(sigma: Tensor) -> Tensor:
    """log(e^sigma - 1): how much likelier a token is hidden than not."""
    return sigma.expm1().log()


class EncoderContext(Context):
    """Positions revealed in each of R rows; the whole text is read again for every question.

    Row r is a text of text_lengths[r] tokens, if given.
    """

    model: Encoder
    time: float | None = None  # of the noise that the model is told; without one, the share that is hidden

    def __init__(self, model: Encoder, rows: int, length: int | None = None, text_lengths: Tensor | None = None):
        super().__init__(model, rows, length)
        self.exists = None
        if text_lengths is not None and bool((text_lengths < self.length).any()):
            self.exists = torch.arange(self.length, device=self.lengths.device) < text_lengths[:, None]

    def _ask_each(self, positions: Tensor, counts: Tensor) -> Asked:
        asked = self._ask(self.lengths[:, None], positions, counts)
        self.passes += int(len(asked.row) > 0)
        return asked

    def _ask_run(
        self, before: Tensor, positions: Tensor, counts: Tensor, ahead: Tensor, ahead_counts: Tensor
    ) -> tuple[Asked, Asked]:
        """A pass for each token of the run, and one for what is ahead."""
        known = before[:, None] + torch.arange(positions.shape[1], device=before.device)
        of_run = self._ask(known, positions, counts)
        self.passes += int(counts.max())
        return of_run, self._ask_each(ahead, ahead_counts)

    @torch.no_grad()
    def _ask(self, known: Tensor, positions: Tensor, counts: Tensor) -> Asked:
        """Answer question j of row r from its first known[r, j] revealed positions, or known[r, 0] for all of them."""
        row, column = (torch.arange(positions.shape[1], device=counts.device) < counts[:, None]).nonzero(as_tuple=True)
        text = row * known.shape[1] + column.clamp(max=known.shape[1] - 1)
        texts, number = text.unique_consecutive(return_inverse=True)
        found = []
        step = max(1, SLOTS // self.length)
        for start, end in pairwise([*range(0, len(texts), step), len(texts)]):
            part = texts[start:end]
            its, revealed = part // known.shape[1], known.flatten()[part]
            within = (number >= start) & (number < end)
            hidden = self._read(its, revealed)
            found.append(hidden[number[within] - start, positions[row[within], column[within]]])
        width = self.model.config.width
        nothing = self.model.token_embedding.weight.new_zeros(0, width)
        return Asked(torch.cat(found) if found else nothing, row, column, self.model)

    def _read(self, rows: Tensor, known: Tensor) -> Tensor:
        """Read texts of rows (N,), of which the first known (N,) revealed positions are seen: (N, T, C)."""
        seen = torch.arange(self.length, device=rows.device) < known[:, None]
        row, column = seen.nonzero(as_tuple=True)
        place = self.positions[rows[row], column]
        tokens = torch.zeros(len(rows), self.length, dtype=torch.long, device=rows.device)
        visible = torch.zeros_like(tokens, dtype=torch.bool)
        tokens[row, place], visible[row, place] = self.tokens[rows[row], column], True
        exists = None if self.exists is None else self.exists[rows]
        self.tokens_forwarded += tokens.numel() if exists is None else int(exists.sum())
        sigma = None if self.time is None else noise(torch.full((len(rows),), self.time, device=rows.device))
        return self.model.hidden(tokens, visible, exists, sigma)
