"""The command line: what each command prints, and one sentence with exit code 2 for each kind of bad input."""

import json
import os
import pty
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyorder.checkpoint import folder_of
from anyorder.cli import main
from anyorder.data.shards import Dataset
from tests.conftest import GOLDEN, flip, refused, write_texts

SHAPE = ["--layers", "2", "--width", "32", "--heads", "2", "--positions", "64", "--batch-size", "8"]


@pytest.fixture(scope="module")
def run(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    arguments = ["train", "tiny", "--data", str(data.folder), "--out", str(out), *SHAPE, "--steps", "40"]
    assert main([*arguments, "--checkpoint-every", "20"]) == 0
    return out


def test_evaluate_agrees_with_itself_whatever_the_batch_size(
    run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for size in (3, 50):
        file = tmp_path / f"{size}.json"
        arguments = [
            "evaluate",
            str(run),
            "--data",
            str(data.folder),
            "--batch-size",
            str(size),
            "--orders",
            "2",
            "--xz",
        ]
        assert main([*arguments, "--json", str(file)]) == 0
        reports.append(json.loads(file.read_text()))
    shown = capsys.readouterr().out
    (first,), (second,) = (report["texts"] for report in reports)
    for one, other in zip(first["results"], second["results"], strict=True):
        assert one["bits_per_byte"] == pytest.approx(other["bits_per_byte"], abs=1e-6)
        assert one["name"] in shown
    named = {result["name"]: result for result in first["results"]}
    assert set(named) == {"left to right", "any order, 2 orders", "any order, mixture of 2", "xz -9e"}
    assert f"{named['left to right']['nats_per_token']:.4f}" in shown


def test_fill_shows_text_and_order_and_json(run: Path, data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fill", str(run), "the people of {2} and the {3}.", "--samples", "2", "--order", "random"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"the people of *\[.*\] and the *\[.*\]\.", shown, flags=re.DOTALL)) >= 1
    assert shown.count("written in this order: 1:") == 2
    assert main(["fill", str(run), "the people of {2}.", "--json", "--seed", "3"]) == 0
    filled = json.loads(capsys.readouterr().out)
    assert filled["text"].startswith("the people of")
    assert [w["logprob"] < 0 for w in filled["written"]] == [True, True]
    assert main(["fill", str(run), "--held-out", str(data.folder), "--samples", "2"]) == 0
    assert capsys.readouterr().out.count("the original has:") == 2


def test_the_same_seed_fills_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        main(["fill", str(run), "the {8} of", "--json", "--seed", seed])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_import_makes_a_run(tmp_path: Path, data: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    import anyorder as ao

    for name in ("aogpt", "sigma"):
        assert main(["import", str(GOLDEN / f"{name}.pt"), "--out", str(tmp_path / name)]) == 0
        expected = torch.load(GOLDEN / f"{name}_expected.pt", weights_only=True)
        for weights in ("ema", "raw"):
            ours, _ = ao.load(tmp_path / name, weights=weights)
            theirs, _ = ao.load(GOLDEN / f"{name}.pt", weights=weights)
            with torch.no_grad():
                assert torch.equal(*(m(expected["tokens"], expected["random_order"]) for m in (ours, theirs)))
    (tmp_path / "sigma" / "config.json").unlink()  # as a kill before the last step of an import leaves it
    assert main(["import", str(GOLDEN / "sigma.pt"), "--out", str(tmp_path / "sigma")]) == 0
    assert "is a run already" in refused(capsys, "import", GOLDEN / "sigma.pt", "--out", tmp_path / "sigma")
    other = tmp_path / "other" / "checkpoints" / "step-1"
    other.mkdir(parents=True)
    (other / "precious").touch()
    assert "step-1 is there already" in refused(capsys, "import", GOLDEN / "sigma.pt", "--out", tmp_path / "other")
    assert (other / "precious").exists()
    assert "has no tokenizer" in refused(capsys, "fill", tmp_path / "aogpt", "{2}")
    assert "was imported" in refused(capsys, "train", "tiny", "--data", data.folder, "--out", tmp_path / "sigma")


def test_a_second_train_command_says_that_all_is_done(
    run: Path, data: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "tiny", "--data", str(data.folder), "--out", str(run), *SHAPE, "--steps", "40"]
    (run / "evaluation.json").touch()  # a run's folder may hold what its user puts there
    assert main([*arguments, "--checkpoint-every", "20"]) == 0
    assert "has all its 40 steps already" in capsys.readouterr().out


def test_bad_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: Dataset) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "page.html").write_text("x")
    (tmp_path / "bad.parquet").write_text("x")
    (tmp_path / "bad.json").write_text("{}")
    (texts,) = write_texts(tmp_path / "texts", documents=3)
    assert "no file" in refused(capsys, "prepare", tmp_path / "absent.txt", "--out", out)
    assert "no file" in refused(capsys, "prepare", tmp_path / "*.md", "--out", out)
    assert "has no text" in refused(capsys, "prepare", tmp_path / "empty.txt", "--out", out)
    assert "not UTF-8" in refused(capsys, "prepare", tmp_path / "latin.txt", "--out", out)
    assert "name the right one with --column" in refused(capsys, "prepare", tmp_path / "rows.jsonl", "--out", out)
    assert "line 1, is not JSON" in refused(capsys, "prepare", tmp_path / "broken.jsonl", "--out", out)
    assert "not a kind of file" in refused(capsys, "prepare", tmp_path / "page.html", "--out", out)
    assert "cannot be read as parquet" in refused(capsys, "prepare", tmp_path / "bad.parquet", "--out", out)
    assert "accepted: bpe:N" in refused(capsys, "prepare", texts, "--out", out, "--tokenizer", "bpe:9")
    assert "accepted: bpe:N" in refused(capsys, "prepare", texts, "--out", out, "--tokenizer", "words")
    assert "not a tokenizer" in refused(capsys, "prepare", texts, "--out", out, "--tokenizer", tmp_path / "bad.json")
    assert "validation share" in refused(capsys, "prepare", texts, "--out", out, "--validation", "1")
    assert "cannot be read" in refused(capsys, "prepare", f"hf:{tmp_path / 'nowhere'}", "--out", out)
    assert not out.exists()
    assert "does not exist and should be a data folder" in refused(
        capsys, "train", "tiny", "--data", out, "--out", tmp_path / "run"
    )
    assert "no manifest" in refused(capsys, "train", "tiny", "--data", tmp_path, "--out", tmp_path / "run")
    message = refused(capsys, "train", "tiny", "--data", data.folder, "--out", tmp_path / "run", "--positions", 2**20)
    assert "less than one chunk" in message
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_than_the_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (texts,) = write_texts(tmp_path / "texts")
    assert (
        main(["prepare", texts, "--out", str(tmp_path / "other"), "--tokenizer", "bpe:290", "--validation", "0.2"]) == 0
    )
    assert "another tokenizer" in refused(capsys, "evaluate", run, "--data", tmp_path / "other")
    assert "another tokenizer" in refused(
        capsys, "train", "tiny", "--data", tmp_path / "other", "--out", run, *SHAPE, "--steps", 40
    )
    assert "another tokenizer" in refused(capsys, "fill", run, "--held-out", tmp_path / "other")


def test_bad_runs_and_arguments(run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "tiny", "--data", data.folder, "--out", tmp_path / "new"]
    assert "accepted: tiny, demo, small, medium" in refused(capsys, "train", "huge", *train[2:])
    assert "accepted: left_to_right, right_to_left, random" in refused(capsys, *train, "--orders", "sideways")
    assert "reads left to right only" in refused(capsys, *train, "--injection", "none")
    assert "a finite base above 0" in refused(capsys, *train, "--rotary-base", "0")
    assert "accepted: none, add" in refused(capsys, *train, "--injection", "film")
    assert "steps is 0" in refused(capsys, *train, "--steps", "0")
    assert "heads" in refused(capsys, *train, "--heads", "7")
    assert "is not a run" in refused(capsys, *train[:4], "--out", tmp_path.parent)
    assert "does not exist" in refused(capsys, "fill", tmp_path / "absent", "{2}")
    assert "accepted: left_to_right" in refused(capsys, "fill", run, "{2}", "--order", "sideways")
    assert "64" in refused(capsys, "fill", run, "{65}")
    assert "no blank" in refused(capsys, "fill", run, "nothing")
    assert "--held-out" in refused(capsys, "fill", run)
    assert "orders" in refused(capsys, "evaluate", run, "--data", data.folder, "--orders", "0")
    (tmp_path / "no.pt").write_text("not a checkpoint")
    (tmp_path / "cut.pt").write_bytes((GOLDEN / "aogpt.pt").read_bytes()[:9000])
    for name in ("no.pt", "cut.pt"):
        assert "cannot be read as a checkpoint" in refused(
            capsys, "import", tmp_path / name, "--out", tmp_path / "imported"
        )
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "new").exists()


def test_damaged_runs(run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "checkpoints" / "step-99").touch()  # not checkpoints
    (broken / "checkpoints" / "step-021").mkdir()
    assert main(["fill", str(broken), "the {2}"]) == 0
    flip(folder_of(broken, 40) / "ema.safetensors")
    assert main(["fill", str(broken), "the {2}"]) == 0
    assert "step-40 is corrupt" in capsys.readouterr().err
    weights = folder_of(broken, 20) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "no whole checkpoint" in refused(capsys, "fill", broken, "the {2}")
    assert "no whole checkpoint" in refused(
        capsys, "train", "tiny", "--data", data.folder, "--out", broken, *SHAPE, "--steps", 40, "--checkpoint-every", 20
    )
    (broken / "config.json").write_text("{")
    assert "not a run's configuration" in refused(capsys, "fill", broken, "the {2}")


def test_unknown_options_exit_with_two() -> None:
    for arguments in (["train"], ["fly"], ["evaluate", "run", "--data", "x", "--orders", "many"]):
        done = subprocess.run([sys.executable, "-m", "anyorder.cli", *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("anyorder: error: ")
        assert len(done.stderr.splitlines()) == 1


def test_odd_values(run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "tiny", "--data", data.folder, "--out", tmp_path / "new"]
    assert "muon_learning_rate" in refused(capsys, *train, "--optimizer", "adamw", "--muon-learning-rate", 1)
    assert "gate_start" in refused(capsys, *train, "--gate-start", 1)
    assert "rotary_base" in refused(capsys, *train, "--injection", "adaln", "--rotary-base", 50)
    assert "learning_rate" in refused(capsys, *train, "--learning-rate", "nan")
    assert "fixed takes" in refused(capsys, *train, "--orders", f"fixed({10**23})")
    assert "32" in refused(capsys, *train, "--orders", "mix(1*" * 2000 + "random" + ")" * 2000)
    assert "cannot encode" in refused(capsys, "fill", run, "the \udcff {3}")
    assert "--json" in refused(capsys, "evaluate", run, "--data", data.folder, "--json", tmp_path / "no" / "x.json")
    assert "should be a data folder" in refused(capsys, "evaluate", run, "--data", run / "config.json")
    (tmp_path / "file").touch()
    assert "is a file" in refused(capsys, *train[:4], "--out", tmp_path / "file")
    assert main(["fill", str(run), "the {3}", "--temperature", "1e-40", "--seed", str(10**23)]) == 0
    rows = tmp_path / "rows.jsonl"
    for content in ('{"text": null}', '{"text": "\\ud800"}', "[" * 100_000, '{"text": ' + "9" * 5000 + "}"):
        rows.write_text(content)
        assert "line 1," in refused(capsys, "prepare", rows, "--out", tmp_path / "out")
    assert (
        main(["evaluate", str(run), "--data", str(data.folder), "--limit", "1", "--json", str(tmp_path / "one")]) == 0
    )
    assert json.loads((tmp_path / "one").read_text())["texts"][0]["results"][0]["nats_error"] is None


def test_damaged_published_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (GOLDEN / "aogpt.pt").read_bytes()
    draw = random.Random(0)
    for number in range(40):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path = tmp_path / f"{number}.pt"
        path.write_bytes(damaged)
        code = main(["import", str(path), "--out", str(tmp_path / f"run{number}")])
        assert code in (0, 2)  # a flip in the archive's own unused bytes harms nothing
        if code == 0:
            raw = torch.load(path, weights_only=True)["model"]
            sound = torch.load(GOLDEN / "aogpt.pt", weights_only=True)["model"]
            assert all(torch.equal(raw[name], sound[name]) for name in sound)
    assert capsys.readouterr().err.count("anyorder: error: ") > 20


def test_errors_are_plain_in_a_terminal_too() -> None:
    """The parser draws coloured boxes where it sees a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "anyorder.cli", "train", "tiny", "--depth", "3"], stdout=theirs, stderr=theirs
    )
    assert process.wait() == 2
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    os.close(theirs)
    assert said.startswith("anyorder: error: ")
    assert said.count("\n") == 1
    assert "--depth" in said
    assert "\x1b" not in said
    assert "\u2500" not in said


@pytest.mark.parametrize("command", ["prepare", "train", "evaluate", "score", "fill", "sample", "import"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 15


def test_sample_writes_from_nothing_and_between(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(run), "--length", "20", "--steps", "5", "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("written in this order:") == 2
    assert "20 tokens in 5 steps" in shown
    assert main(["sample", str(run), "--prefix", "the people", "--suffix", " the law", "--length", "30", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["text"].startswith("the people")
    assert written["text"].endswith(" the law")
    assert sorted(w["step"] for w in written["written"]) == list(range(len(written["written"])))
    assert main(["sample", str(run), "--length", "12", "--watch", "--delay", "0", "--order", "margin(3)"]) == 0
    assert len(re.findall(r"^step \d+  \d+:", capsys.readouterr().out, flags=re.MULTILINE)) == 12
    for way in (["--exact"], ["--burst", "3"], ["--temperature", "1.0..0.5", "--top-p", "0.9", "--precision", "bf16"]):
        assert main(["sample", str(run), "--length", "16", "--samples", "3", "--json", *way]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_text_appears_in_the_terminal(run: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ["sample", str(run), "--length", "6", "--watch", "--delay", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "anyorder.cli", *arguments],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    assert process.wait() == 0
    said = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert " ·" * 6 in said
    assert said.count("·") >= 6 + 5 + 4 + 3 + 2 + 1  # a dot less at every step
    assert "6 tokens in 6 steps" in said


def test_lengths_that_the_model_chooses_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fill", str(run), "the {} of the {red|people}", "--longest", "3", "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("log-probability by the tokens of each blank") == 2
    assert main(["fill", str(run), "the {} of the", "--longest", "3", "--json"]) == 0
    assert [c["lengths"] for c in json.loads(capsys.readouterr().out)["candidates"]] == [[1], [2], [3]]


def test_bad_sampling(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "accepted: 1 to 64" in refused(capsys, "sample", run, "--steps", 65)
    assert "steps is 0" in refused(capsys, "sample", run, "--steps", 0)
    assert "temperature is -1.0" in refused(capsys, "sample", run, "--temperature=-1")
    assert "temperature is 'warm'" in refused(capsys, "fill", run, "{2}", "--temperature", "warm")
    assert "accepted: more than those, at most 64" in refused(capsys, "sample", run, "--length", 65)
    assert "accepted: more than those" in refused(capsys, "sample", run, "--prefix", "the law", "--length", 1)
    assert "accepted: one of them" in refused(capsys, "sample", run, "--watch", "--json")
    assert "samples is 0" in refused(capsys, "sample", run, "--samples", 0)
    assert "steps is 3; accepted: 1 to 2" in refused(capsys, "fill", run, "the {2}", "--steps", 3)
    assert "at most 64" in refused(capsys, "fill", run, "the {64} of")
    assert "no token" in refused(capsys, "fill", run, "the {2:日}")
    assert "which does not" in refused(capsys, "sample", run, "--order", "entropy", "--exact")
