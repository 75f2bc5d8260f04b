"""What a position may take: masks over the vocabulary, and lists of choices that span several positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyorder.errors import InputError


@dataclass(frozen=True)
class Choice:
    """Some positions of a row that together hold one of several options."""

    row: int
    positions: tuple[int, ...]
    options: Tensor  # (C, n) tokens

    def fitting(self, seen: Tensor) -> Tensor:
        """Mark the options that agree with what its positions hold (n,), -1 where they hold nothing yet: (C,)."""
        return ((self.options == seen) | (seen < 0)).all(1)


@dataclass(frozen=True)
class Constraint:
    """Which tokens may stand where: a mask for each kind of position, and choices that narrow as they are written."""

    table: Tensor | None = None  # (K, V) bool; None allows everything
    kind: Tensor | None = None  # (B, T) the row of the table for each position
    choices: tuple[Choice, ...] = ()

    def to(self, device: torch.device) -> "Constraint":
        """Bring all of it to a device."""
        table, kind = (None if part is None else part.to(device) for part in (self.table, self.kind))
        choices = tuple(Choice(c.row, c.positions, c.options.to(device)) for c in self.choices)
        return Constraint(table, kind, choices)

    def of_several(self) -> bool:
        """Tell whether a token limits what another position may take."""
        return any(len(choice.positions) > 1 for choice in self.choices)

    def mask(self, row: Tensor, position: Tensor, known: Tensor | None, entries: int) -> Tensor | None:
        """Say which of the first `entries` tokens questions may take: rows, positions (P,) -> (P, E); None: any.

        `known` (P, T) holds the tokens that each question sees, -1 where there is none; only choices read it.
        """
        mask = None
        if self.table is not None and self.kind is not None:
            mask = self.table[self.kind[row, position], :entries]
        for choice in self.choices:
            assert known is not None
            of_row = row == choice.row
            for column, its_position in enumerate(choice.positions):
                for question in (of_row & (position == its_position)).nonzero()[:, 0].tolist():
                    if mask is None:
                        mask = torch.ones(len(row), entries, dtype=torch.bool, device=row.device)
                    seen = known[question, list(choice.positions)]  # (n,)
                    fits = choice.fitting(seen)
                    if not fits.any():  # drafts that do not go together, and will not stand: any law does
                        fits = torch.ones_like(fits)
                    fitting = torch.zeros_like(mask[question])
                    fitting[choice.options[fits, column]] = True
                    mask[question] = mask[question] & fitting
        return mask

    def checked(self, tokens: Tensor, lengths: Tensor, vocabulary: int) -> "Constraint":
        """Refuse choices that do not fit texts (B, T) of lengths (B,), -1 at blanks; drop what a mask forbids."""
        taken: set[tuple[int, int]] = set()
        found = []
        for choice in self.choices:
            options, where = choice.options, f"positions {choice.positions} of row {choice.row}"
            if options.dim() != 2 or options.shape[1] != len(choice.positions) or not options.numel():
                raise InputError(
                    f"options {tuple(options.shape)} for {len(choice.positions)} positions; accepted: (C, n)"
                )
            if not 0 <= options.min() <= options.max() < vocabulary:
                raise InputError(
                    f"options name tokens {int(options.min())} to {int(options.max())}; accepted: 0 to {vocabulary - 1}"
                )
            if not 0 <= choice.row < len(tokens) or not all(0 <= p < lengths[choice.row] for p in choice.positions):
                raise InputError(
                    f"a choice is for {where}; accepted: rows below {len(tokens)}, positions within the text"
                )
            places = {(choice.row, position) for position in choice.positions}
            if len(places) < len(choice.positions) or places & taken:
                raise InputError(f"a position is named twice in choices, by that for {where}; accepted: once")
            taken |= places
            seen = tokens[choice.row, list(choice.positions)]
            fits = choice.fitting(seen)
            if self.table is not None and self.kind is not None:
                mask = self.table[self.kind[choice.row, list(choice.positions)]]  # (n, V)
                column = torch.arange(len(seen), device=options.device)
                fits &= (mask[column, options] | (seen >= 0)).all(1)
            if not fits.any():
                raise InputError(
                    f"no option for {where} agrees with what is known and allowed there; accepted: at least one"
                )
            found.append(Choice(choice.row, choice.positions, options[fits]))
        return Constraint(self.table, self.kind, tuple(found))


def from_mask(allowed: Tensor | None, choices: Sequence[Choice], shape: tuple[int, int, int]) -> Constraint:
    """Make a constraint of a bool mask that broadcasts to `shape` (B, T, V)."""
    if allowed is None:
        return Constraint(choices=tuple(choices))
    if allowed.dtype != torch.bool:
        raise InputError(f"allowed is of {allowed.dtype}; accepted: a bool mask")
    try:
        allowed.expand(shape)
    except RuntimeError:
        raise InputError(f"allowed {tuple(allowed.shape)} does not broadcast to {shape}") from None
    whole = allowed[(None,) * (3 - allowed.dim())].expand(-1, -1, shape[2])  # (B or 1, T or 1, V)
    rows, columns = whole.shape[:2]
    kind = torch.arange(rows * columns, device=allowed.device).view(rows, columns).expand(shape[:2])
    return Constraint(whole.flatten(0, 1), kind, tuple(choices))
