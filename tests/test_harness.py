"""lm-evaluation-harness on a local task, without a hub: its figures are those of `anyorder score`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import anyorder as ao
from anyorder.cli import main
from anyorder.data.shards import Dataset
from tests.conftest import text

lm_eval = pytest.importorskip("lm_eval")

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: {kind}
doc_to_text: "{before}"
doc_to_target: "{{{{text}}}}"
{rest}
"""
CHOICE = """\
doc_to_choice: ["peace", "war of the world", "law"]
metric_list:
  - metric: acc
"""
PERPLEXITY = """\
metric_list:
  - metric: word_perplexity
"""
CONTINUE = """\
generation_kwargs:
  until: ["."]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""
TEXTS = [text(20, 1), text(200, 2), text(3, 3)]


@pytest.fixture(scope="module")
def run(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("harness") / "run"
    shape = ["--layers", "2", "--width", "32", "--heads", "2", "--positions", "64", "--batch-size", "8"]
    assert main(["train", "tiny", "--data", str(data.folder), "--out", str(out), *shape, "--steps", "30"]) == 0
    return out


@pytest.fixture(scope="module")
def samples(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the command lm_eval says of three local tasks, text by text."""
    place = tmp_path_factory.mktemp("tasks")
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    for name, kind, before, rest in (
        ("rolling", "loglikelihood_rolling", "", PERPLEXITY),
        ("choice", "multiple_choice", "the people of the", CHOICE.replace("{", "{{")),
        ("continue", "generate_until", "the people of", CONTINUE),
    ):
        task = TASK.format(name=name, rows=rows, kind=kind, before=before, rest=rest)
        if name == "choice":
            task = task.replace('doc_to_target: "{{text}}"', "doc_to_target: 0")
        (place / f"{name}.yaml").write_text(task)
    command = Path(sys.executable).with_name("lm_eval")
    arguments = ["--model", "anyorder", "--model_args", f"run={run}", "--batch_size", "2"]
    arguments += ["--tasks", "rolling,choice,continue", "--include_path", str(place)]
    done = subprocess.run(
        [command, *arguments, "--output_path", str(place / "out"), "--log_samples"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in ("rolling", "choice", "continue"):
        (file,) = (place / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: int(one["doc_id"]))
    return found


def score(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["score", str(run), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_whole_texts_score_as_anyorder_score_does(
    run: Path, samples: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = []
    for one, sample in zip(TEXTS, samples["rolling"], strict=True):
        ours = score(run, capsys, "--text", one)
        assert float(sample["resps"][0][0]) == pytest.approx(ours["logprob"], abs=1e-6)
        (tmp_path / "one.txt").write_text(one)
        assert score(run, capsys, "--file", str(tmp_path / "one.txt"))["logprob"] == ours["logprob"]
        lengths.append(ours["tokens_scored"])
    assert max(lengths) > 128  # three windows of the model's 64 positions


def test_continuations_score_as_their_part_given_the_rest(
    run: Path, samples: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    for sample in samples["choice"]:
        for (logprob, greedy), after in zip(
            (response[0] for response in sample["resps"]), ("peace", "war of the world", "law"), strict=True
        ):
            ours = score(run, capsys, "--text", f"the people of the{{ {after}}}")
            assert float(logprob) == pytest.approx(ours["logprob"], abs=1e-6)
            assert str(greedy) in ("True", "False")


def test_generation_is_the_likeliest_until_it_stops(run: Path, samples: dict[str, list[dict[str, Any]]]) -> None:
    model, tokenizer = ao.load(run)
    assert tokenizer is not None
    known = tokenizer.encode("the people of")
    tokens = torch.tensor([known + [0] * 12])
    blanks = torch.arange(tokens.shape[1])[None] >= len(known)
    allowed = torch.arange(model.config.vocabulary) < tokenizer.vocabulary
    expected = tokenizer.decode(
        ao.fill(model, tokens, blanks, temperature=0, allowed=allowed).tokens[0, len(known) :].tolist()
    )
    for sample in samples["continue"]:
        (written,) = sample["resps"][0]
        assert written == expected.partition(".")[0]


def test_batches_do_not_matter(run: Path) -> None:
    from lm_eval.api.instance import Instance

    from anyorder.integrations.harness import AnyOrder

    pairs = [("the people", " of the world"), ("", "peace"), (TEXTS[1], " law"), ("in our", " year")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    for order in ("left_to_right", "random"):
        one, other = (
            AnyOrder(str(run), order=order, batch_size=size).loglikelihood(asked, disable_tqdm=True) for size in (1, 4)
        )
        assert [a for a, _ in one] == pytest.approx([b for b, _ in other], abs=1e-5)
        assert [a for _, a in one] == [b for _, b in other]


def test_greedy_is_said_where_each_token_is_the_likeliest(run: Path) -> None:
    from lm_eval.api.instance import Instance

    from anyorder.integrations.harness import AnyOrder

    model = AnyOrder(str(run))
    (written,) = model.generate_until(
        [Instance("generate_until", {}, ("the people of", {"max_gen_toks": 6}), 0)], disable_tqdm=True
    )
    asked = [Instance("loglikelihood", {}, ("the people of", after), 0) for after in (written, " zqx")]
    (_, likeliest), (_, other) = model.loglikelihood(asked, disable_tqdm=True)
    assert not other
    if model.text_tokens.encode("the people of" + written)[-6:] == model.text_tokens.encode(written)[-6:]:
        assert likeliest


def test_bad_arguments(run: Path, tmp_path: Path) -> None:
    from anyorder.integrations.harness import AnyOrder

    with pytest.raises(ao.InputError, match="does not exist"):
        AnyOrder(str(tmp_path / "absent"))
    with pytest.raises(ao.InputError, match="accepted: left_to_right"):
        AnyOrder(str(run), order="sideways")
    with pytest.raises(ao.InputError, match="accepted: 1 or more"):
        AnyOrder(str(run), batch_size=0)
