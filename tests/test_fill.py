"""Filling: what was known stays, blanks come in the order asked for, each from the model's own conditional."""

import itertools
from collections import Counter

import pytest
import torch
from tokenizers import decoders, pre_tokenizers

import anyorder as ao
from anyorder.data.shards import Dataset
from anyorder.data.tokenizer import Tokenizer, make_tokenizer
from anyorder.sampling.held_out import BLANKS, held_out_templates
from anyorder.sampling.template import allowed_tokens, parse_template, pieces_of
from tests.conftest import small_model


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (4, 16), generator=generator)
    blanks = torch.rand(4, 16, generator=generator) < torch.tensor([0.2, 0.5, 0.9, 0.0])[:, None]
    return tokens, blanks


@pytest.mark.parametrize("order", ["left_to_right", "right_to_left", "random"])
def test_known_tokens_stay_and_logprobs_are_the_models(order: str) -> None:
    model = small_model(injection="adaln+rotary")
    tokens, blanks = ragged()
    out = ao.fill(model, tokens, blanks, order, generator=torch.Generator().manual_seed(0))
    assert torch.equal(out.tokens[~blanks], tokens[~blanks])
    with torch.no_grad():
        nats = ao.order_nll(model, out.tokens, out.order)  # (B, T), by step
    by_position = torch.zeros(4, 16).scatter(1, out.order, -nats)
    assert torch.allclose(out.logprobs[blanks], by_position[blanks], atol=1e-4)
    assert (out.logprobs[~blanks] == 0).all()
    known = (~blanks).sum(1)
    for row in range(4):
        first, rest = out.order[row, : known[row]].tolist(), out.order[row, known[row] :].tolist()
        assert first == sorted(first) == (~blanks[row]).nonzero()[:, 0].tolist()
        if order != "random":
            assert rest == sorted(rest, reverse=order == "right_to_left")
    assert out.forward_passes == int(blanks.sum(1).max())


def test_greedy_takes_the_likeliest_and_ignores_what_is_not_written_yet() -> None:
    model = small_model()
    tokens, blanks = ragged()
    first = ao.fill(model, tokens, blanks, temperature=0)
    again = ao.fill(model, tokens.masked_fill(blanks, 63), blanks, temperature=0)  # what lay under the blanks
    assert torch.equal(first.tokens, again.tokens)
    with torch.no_grad():
        best = model(first.tokens, first.order).argmax(-1)  # (B, T) by step
    by_position = torch.zeros_like(tokens).scatter(1, first.order, best)
    assert torch.equal(first.tokens[blanks], by_position[blanks])


def test_samples_follow_the_enumerated_law() -> None:
    """Two blanks of three positions, vocabulary 3: chi-squared against the model's conditionals."""
    model = small_model(positions=3, vocabulary=3, scale=8.0)
    tokens, blanks = torch.tensor([[0, 2, 0]]), torch.tensor([[True, False, True]])
    count = 20_000
    out = ao.fill(
        model,
        tokens.expand(count, 3),
        blanks.expand(count, 3),
        "right_to_left",
        generator=torch.Generator().manual_seed(0),
    )
    texts = torch.tensor([[a, 2, b] for a, b in itertools.product(range(3), repeat=2)])
    with torch.no_grad():
        nats = ao.order_nll(model, texts, torch.tensor([[1, 2, 0]]).expand(9, 3))[:, 1:].sum(1)
    expected = nats.neg().exp() * count
    seen = Counter(map(tuple, out.tokens.tolist()))
    counts = torch.tensor([seen[tuple(text)] for text in texts.tolist()])
    assert int(counts.sum()) == count
    assert float(((counts - expected) ** 2 / expected).sum()) < 26.1  # the 0.999 quantile for 8 degrees of freedom
    uniform = torch.full((9,), count / 9)
    assert float(((counts - uniform) ** 2 / uniform).sum()) > 100  # the test can tell laws apart


def test_temperature_and_allowed_tokens() -> None:
    model = small_model()
    tokens, blanks = torch.zeros(64, 16, dtype=torch.long), torch.ones(64, 16, dtype=torch.bool)
    allowed = torch.zeros(64, dtype=torch.bool)
    allowed[[3, 7]] = True
    out = ao.fill(model, tokens, blanks, allowed=allowed, generator=torch.Generator().manual_seed(0))
    assert set(out.tokens.unique().tolist()) == {3, 7}
    cold, hot = (
        ao.fill(model, tokens, blanks, temperature=t, generator=torch.Generator().manual_seed(0)).tokens[:, 0]
        for t in (0.05, 5.0)
    )
    assert len(cold.unique()) < len(hot.unique())


def test_what_does_not_fit_is_refused() -> None:
    model = small_model()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    blanks = torch.ones(1, 4, dtype=torch.bool)
    none = torch.zeros(64, dtype=torch.bool)
    for attempt, words in (
        (lambda: ao.fill(model, tokens, blanks[:, :3]), "do not match"),
        (lambda: ao.fill(model, tokens, blanks, temperature=-1), "temperature"),
        (lambda: ao.fill(model, tokens, blanks, "sideways"), "accepted: left_to_right"),
        (lambda: ao.fill(model, tokens, blanks, torch.tensor([[0, 1]])), "does not name all"),
        (lambda: ao.fill(model, tokens, blanks, allowed=none), "no allowed token"),
        (lambda: ao.fill(model, torch.zeros(1, 17, dtype=torch.long), torch.ones(1, 17) > 0), "17 tokens"),
    ):
        with pytest.raises(ao.InputError, match=words):
            attempt()


def test_templates(data: Dataset) -> None:
    tokenizer: Tokenizer = data.tokenizer
    template = parse_template("the law {2} of {3}, {{peace}}", tokenizer, 64)
    assert int(template.blanks.sum()) == 5
    known = template.tokens[~template.blanks].tolist()
    assert tokenizer.decode(known) == "the law of, {peace}"  # the space before a blank belongs to the blank
    first = len(tokenizer.encode("the law"))
    assert template.after_space == (first, first + 2 + len(tokenizer.encode(" of")))
    allowed = allowed_tokens(template, tokenizer, vocabulary=320)
    assert allowed.shape == (len(template.tokens), 320)
    assert not allowed[:, tokenizer.end_of_text].any()
    assert not allowed[:, tokenizer.vocabulary :].any()
    spaced = [t for t in range(320) if allowed[template.after_space[0], t]]
    assert spaced
    assert all(tokenizer.decode([token]).startswith(" ") for token in spaced)
    for text in ("no blank", "{}", "{0}", "{x}", "open {2", "{3}}", "{" + "9" * 5000 + "}"):
        with pytest.raises(ao.InputError, match="accepted: text with blanks"):
            parse_template(text, tokenizer, 64)
    with pytest.raises(ao.InputError, match="accepted: at most 64"):
        parse_template("of {65536} the {65536}", tokenizer, 64)


def test_a_vocabulary_of_bytes_keeps_the_space_in_the_known_text() -> None:
    tokenizer = make_tokenizer("bpe:257", iter(["the people"]))
    template = parse_template("the {4} of the {2}.", tokenizer, 64)
    assert tokenizer.decode(template.tokens[~template.blanks].tolist()) == "the  of the ."
    assert allowed_tokens(template, tokenizer, 320).any(-1).all()


@pytest.mark.parametrize("kind", ["metaspace", "prefix"])
def test_a_tokenizer_that_changes_known_text_is_refused(kind: str) -> None:
    backend = make_tokenizer("bpe:300", iter(["the people of the law " * 50])).backend
    if kind == "metaspace":
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ao.InputError, match="accepted: a tokenizer that keeps a text as it is"):
        parse_template("the people{1}, of the{2}s law", Tokenizer(backend), 64)


def test_pieces_read_back(data: Dataset) -> None:
    template = parse_template("of the {1} law", data.tokenizer, 64)
    filled = template.tokens.clone()
    filled[template.blanks] = data.tokenizer.encode(" people")[0]
    pieces = pieces_of(filled, template.blanks, data.tokenizer)
    assert [piece.written for piece in pieces] == [False, True, False]
    assert "".join(piece.text for piece in pieces) == data.tokenizer.decode(filled.tolist())


def test_held_out_passages_are_whole_sentences_with_whole_words_blanked(data: Dataset) -> None:
    found = held_out_templates(data, 128, 3, seed=0)
    assert len(found) == 3
    for template, truth in found:
        text = data.tokenizer.decode(truth.tolist())
        assert text.endswith((".", "!", "?"))
        assert torch.equal(truth[~template.blanks], template.tokens[~template.blanks])
        written = [piece.text for piece in pieces_of(truth, template.blanks, data.tokenizer) if piece.written]
        assert len(written) == BLANKS
        assert all(piece.startswith(" ") for piece in written)
