"""Filling: what was known stays, blanks come in the order asked for, each from the model's own conditional."""

import re

import pytest
import torch
from tokenizers import decoders, pre_tokenizers

import anyorder as ao
from anyorder.data.shards import Dataset
from anyorder.data.tokenizer import Tokenizer, make_tokenizer
from anyorder.sampling.fill import Manner
from anyorder.sampling.filters import Filters
from anyorder.sampling.held_out import BLANKS, held_out_templates
from anyorder.sampling.template import constrain, parse_template, pieces_of
from anyorder.sampling.texts import fill_templates
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
        (
            lambda: ao.fill(model, torch.zeros(1, 17, dtype=torch.long), torch.ones(1, 17) > 0),
            "17 positions; accepted",
        ),
    ):
        with pytest.raises(ao.InputError, match=words):
            attempt()


def test_templates(data: Dataset) -> None:
    tokenizer: Tokenizer = data.tokenizer
    (template,) = parse_template("the law {2} of {3}, {{peace}}", tokenizer).templates(64)
    assert int(template.blanks.sum()) == 5
    known = template.tokens[~template.blanks].tolist()
    assert tokenizer.decode(known) == "the law of, {peace}"  # the space before a blank belongs to the blank
    first = len(tokenizer.encode("the law"))
    starts = [start for start, _, _ in template.spans]
    assert starts == [first, first + 2 + len(tokenizer.encode(" of"))]
    assert all(blank.after_space for _, _, blank in template.spans)
    constraint = constrain([template], tokenizer, 320)
    rows, positions = torch.zeros(len(template.tokens), dtype=torch.long), torch.arange(len(template.tokens))
    allowed = constraint.mask(rows, positions, None, 320)
    assert allowed is not None
    assert not allowed[:, tokenizer.end_of_text].any()
    assert not allowed[:, tokenizer.vocabulary :].any()
    spaced = allowed[first].nonzero()[:, 0].tolist()
    assert spaced
    assert all(tokenizer.decode([token]).startswith(" ") for token in spaced)
    for text in ("no blank", "{0}", "{x}", "open {2", "{3}}", "{" + "9" * 5000 + "}", "{3:}", "{a||b}"):
        with pytest.raises(ao.InputError, match="accepted: text with blanks"):
            parse_template(text, tokenizer)
    with pytest.raises(ao.InputError, match="accepted: at most 64"):
        parse_template("of {65536} the {65536}", tokenizer).templates(64)
    with pytest.raises(ao.InputError, match="512 combinations of lengths; accepted: at most 256"):
        parse_template("{} {} {}", tokenizer).templates(64)
    with pytest.raises(ao.InputError, match="longest is 0"):
        parse_template("{}", tokenizer, 0)
    with pytest.raises(ao.InputError, match="z-a are no range"):
        parse_template("{2:z-a}", tokenizer)


def filled(data: Dataset, text: str, **ways: object) -> list[str]:
    """Fill a template 20 times by an untrained model; return what was written in all blanks."""
    model = small_model(vocabulary=320, entries=data.tokenizer.vocabulary, positions=64)
    cases = [parse_template(text, data.tokenizer, 4).templates(64)] * 20
    manner = Manner(**{"order": "random", **ways})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    return [
        "|".join(
            piece.text for piece in pieces_of(found.out.tokens, found.template.blanks, data.tokenizer) if piece.written
        )
        for found in fill_templates(model, data.tokenizer, cases, manner, Filters(), generator)
    ]


@pytest.mark.parametrize("ways", [{}, {"exact": True}, {"order": "margin"}])
def test_constraints_hold_in_every_blank(data: Dataset, ways: dict[str, object]) -> None:
    written = filled(data, "the {3:a-f} of {peace|war and peace|law} in {:0-9}.", **ways)
    assert len(set(written)) > 10
    for text in written:
        letters, choice, number = text.split("|")
        assert re.fullmatch(" [a-f]+", letters)
        assert choice in (" peace", " war and peace", " law")
        assert re.fullmatch(" [0-9]+", number)


def test_contradictions_are_refused(data: Dataset) -> None:
    with pytest.raises(ao.InputError, match="no token of the run's tokenizer is made of '\u65e5' alone"):
        filled(data, "the {2:\u65e5}")
    with pytest.raises(ao.InputError, match="choices of several tokens were given with several tokens a step"):
        filled(data, "the {war and peace|the law of union}", steps=1)
    model, tokens = small_model(), torch.zeros(1, 4, dtype=torch.long)
    only = torch.arange(64) == 5
    with pytest.raises(ao.InputError, match="known and allowed there"):
        ao.fill(model, tokens, tokens == 0, allowed=only, choices=[ao.Choice(0, (1,), torch.tensor([[7]]))])
    with pytest.raises(ao.InputError, match="agrees with what is known"):
        ao.fill(model, tokens, tokens == 1, choices=[ao.Choice(0, (1,), torch.tensor([[7]]))])
    twice = [ao.Choice(0, (1, 2), torch.tensor([[7, 7]])), ao.Choice(0, (2,), torch.tensor([[7]]))]
    with pytest.raises(ao.InputError, match="named twice"):
        ao.fill(model, tokens, tokens == 0, choices=twice)
    with pytest.raises(ao.InputError, match="accepted: rows below 1"):
        ao.fill(model, tokens, tokens == 0, choices=[ao.Choice(3, (1,), torch.tensor([[7]]))])


def test_the_best_length_of_a_blank_wins_and_scores_are_the_models(data: Dataset) -> None:
    model = small_model(vocabulary=320, entries=data.tokenizer.vocabulary, positions=64)
    cases = [parse_template("the law {} of the {1} people", data.tokenizer, 5).templates(64)]
    assert len(cases[0]) == 5
    (found,) = fill_templates(model, data.tokenizer, cases, Manner(), Filters(0))
    assert [candidate.lengths for candidate in found.candidates] == [(n, 1) for n in range(1, 6)]
    best = max(found.candidates, key=lambda candidate: candidate.score)
    assert [length for _, length, _ in found.template.spans] == list(best.lengths)
    blanks = found.template.blanks
    scores = ao.logprob(model, found.out.tokens[None], blanks[None], ~blanks[None])
    assert float(scores[0, blanks].mean()) == pytest.approx(best.score, abs=1e-4)


def test_a_choice_is_one_event_whatever_its_length(data: Dataset) -> None:
    """The options' whole log-probabilities are compared, so that a long one does not win by its easy tokens."""
    model = small_model(vocabulary=320, entries=data.tokenizer.vocabulary, positions=64)
    cases = [parse_template("the {law|people of the government} of", data.tokenizer).templates(64)]
    (found,) = fill_templates(model, data.tokenizer, cases, Manner(), Filters(0))
    assert len(found.candidates) == 2
    for candidate, template in zip(found.candidates, cases[0], strict=True):
        (alone,) = fill_templates(model, data.tokenizer, [[template]], Manner(), Filters(0))
        total = float(alone.out.model_logprobs[template.blanks].sum())
        assert candidate.score == pytest.approx(total, abs=1e-4)
    assert len(found.template.tokens) == min(len(template.tokens) for template in cases[0])


def test_a_short_text_is_written_in_its_own_order_whatever_it_is_batched_with() -> None:
    model = small_model()
    tokens, lengths = torch.zeros(3, 16, dtype=torch.long), torch.tensor([16, 9, 12])
    blanks = torch.arange(16) < lengths[:, None]
    out = ao.fill(model, tokens, blanks, "fixed(3)", lengths=lengths, temperature=0.0)
    for row, length in enumerate(lengths.tolist()):
        alone = ao.fill(model, tokens[:1, :length], blanks[row : row + 1, :length], "fixed(3)", temperature=0.0)
        assert torch.equal(alone.order[0], out.order[row, :length])
        assert torch.equal(alone.tokens[0], out.tokens[row, :length])


def test_blanks_that_touch_stay_apart(data: Dataset) -> None:
    (template,) = parse_template("of{2}{1} law", data.tokenizer).templates(64)
    starts = [start for start, _, _ in template.spans]
    pieces = pieces_of(template.tokens, template.blanks, data.tokenizer, starts)
    assert [piece.written for piece in pieces] == [False, True, True, False]


def test_a_vocabulary_of_bytes_keeps_the_space_in_the_known_text() -> None:
    tokenizer = make_tokenizer("bpe:257", iter(["the people"]))
    (template,) = parse_template("the {4} of the {2}.", tokenizer).templates(64)
    assert tokenizer.decode(template.tokens[~template.blanks].tolist()) == "the  of the ."
    assert not any(blank.after_space for _, _, blank in template.spans)


@pytest.mark.parametrize("kind", ["metaspace", "prefix"])
def test_a_tokenizer_that_changes_known_text_is_refused(kind: str) -> None:
    backend = make_tokenizer("bpe:300", iter(["the people of the law " * 50])).backend
    if kind == "metaspace":
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ao.InputError, match="accepted: a tokenizer that keeps a text as it is"):
        parse_template("the people{1}, of the{2}s law", Tokenizer(backend))


def test_pieces_read_back(data: Dataset) -> None:
    (template,) = parse_template("of the {1} law", data.tokenizer).templates(64)
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
