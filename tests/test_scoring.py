"""anyorder evaluate and anyorder score on the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anyorder.cli import main
from anyorder.data.shards import Dataset
from tests.conftest import refused, text

SHAPE = ["--layers", "2", "--width", "32", "--heads", "2", "--positions", "64", "--batch-size", "8"]


@pytest.fixture(scope="module")
def runs(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small any-order run, and one that reads left to right only."""
    folder = tmp_path_factory.mktemp("scoring")
    train = ["train", "tiny", "--data", str(data.folder), *SHAPE, "--steps", "30", "--checkpoint-every", "30"]
    assert main([*train, "--out", str(folder / "any")]) == 0
    assert main([*train, "--out", str(folder / "plain"), "--injection", "none", "--orders", "left_to_right"]) == 0
    return {"any": folder / "any", "plain": folder / "plain"}


def write_sets(folder: Path) -> list[str]:
    rows = folder / "wikitext2.jsonl"
    rows.write_text("".join(json.dumps({"text": text(30, n)}) + "\n" for n in range(8)), encoding="utf-8")
    sentences = folder / "ptb.txt"
    sentences.write_text(text(200, 9).replace("\n\n", "\n"), encoding="utf-8")
    return ["--file", f"wikitext2={rows}", f"ptb={sentences}"]


def test_the_suite_from_local_files(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_sets(tmp_path)
    hashes = {}
    for convention in ("published", "mdlm"):
        out = tmp_path / f"{convention}.json"
        command = ["evaluate", str(runs["any"]), "--suite", "zero-shot", "--convention", convention, *files]
        assert main([*command, "--ensemble", "4", "--contexts", "2", "--bound", "--json", str(out)]) == 0
        shown = capsys.readouterr().out
        report = json.loads(out.read_text())
        assert report["convention"] == convention
        assert [scored["text"] for scored in report["texts"]] == ["wikitext2", "ptb"]
        for scored in report["texts"]:
            assert scored["tokens_sha256"][:16] in shown
            assert scored["tokens"] == scored["tokens_in_all"]
            named = {result["name"]: result for result in scored["results"]}
            assert named["ensemble of 4"]["nats_error"] > 0
            assert f"{named['left to right']['perplexity']:.2f}" in shown
        hashes[convention] = [scored["tokens_sha256"] for scored in report["texts"]]
    assert len({*hashes["published"], *hashes["mdlm"]}) == 4


def test_a_left_to_right_model_is_scored_left_to_right(
    runs: dict[str, Path], data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["evaluate", str(runs["plain"]), "--data", str(data.folder), "--limit", "4"]
    assert main([*plain, "--json", str(tmp_path / "out.json")]) == 0
    (scored,) = json.loads((tmp_path / "out.json").read_text())["texts"]
    assert [result["name"] for result in scored["results"]] == ["left to right"]
    for more in (["--ensemble", "4"], ["--bound"], ["--orders", "3"]):
        assert "reads in any order" in refused(capsys, *plain, *more)
    assert "left_to_right" in refused(capsys, *plain, "--order", "right_to_left")


def test_a_figure_is_drawn(runs: dict[str, Path], data: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ["evaluate", str(runs["any"]), "--data", str(data.folder), "--limit", "4", "--ensemble", "4"]
    assert main([*command, "--figure", str(tmp_path / "curve.png")]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert main([*command, "--mode", "paper", "--figure", str(tmp_path / "curve.svg")]) == 0
    assert "ensemble of context orders" in (tmp_path / "curve.svg").read_text()


def test_ctrl_c_keeps_what_was_scored(runs: dict[str, Path], data: Dataset, tmp_path: Path) -> None:
    """The command as a user runs it: interrupted, then run again, it ends with the figures of one that was not."""
    command = [sys.executable, "-m", "anyorder.cli", "evaluate", str(runs["any"]), "--data", str(data.folder)]
    command += ["--ensemble", "64", "--contexts", "16", "--batch-size", "1", "--limit", "24"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--json", str(tmp_path / "cut.json")], stderr=subprocess.PIPE, env=environment
    )
    kept = runs["any"] / "evaluations"
    deadline = time.monotonic() + 60
    while not any("ensemble" in file.read_text() for file in kept.glob("*.jsonl")):
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    assert any("ensemble" in file.read_text() for file in kept.glob("*.jsonl"))
    found = []
    for name in ("cut", "whole"):
        assert main([*command[3:], "--json", str(tmp_path / f"{name}.json")]) == 0
        found.append(json.loads((tmp_path / f"{name}.json").read_text()))
        assert not kept.exists()
    assert found[0] == found[1]


def score(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["score", str(run), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_score_obeys_the_chain_rule(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    whole = score(capsys, runs["any"], "--text", "the people of the world in peace")
    first = score(
        capsys,
        runs["any"],
        "--text",
        "{the people of} the world in peace",
        "--given",
        "the people of the world in peace",
    )
    rest = score(capsys, runs["any"], "--text", "the people of{ the world in peace}")
    assert first["logprob"] + rest["logprob"] == pytest.approx(whole["logprob"], abs=1e-4)
    assert first["tokens_given"] == 0
    assert whole["tokens_scored"] == first["tokens_scored"] + rest["tokens_scored"]
    assert sum(token["logprob"] for token in whole["tokens"]) == pytest.approx(whole["logprob"], abs=1e-4)
    between = score(capsys, runs["any"], "--text", "the people of the {world} in peace", "--order", "random")
    assert {token["part"] for token in between["tokens"]} == {"scored", "given"}


def test_score_is_shown_token_by_token(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["score", str(runs["any"]), "--text", "the {people} of", "--given", "{the} people of"]) == 0
    shown = capsys.readouterr().out
    assert "hidden" in shown
    assert "given" in shown
    assert "nats per token" in shown


def test_bad_input(runs: dict[str, Path], data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs["any"]
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").touch()
    scored, evaluated = ["score", run], ["evaluate", run]
    of_data = [*evaluated, "--data", data.folder]
    suite = [*evaluated, "--suite", "zero-shot"]
    for arguments, said in (
        ([*scored, "--text", "the {people} of", "--given", "the {people} of"], "both scored and given"),
        ([*scored, "--text", "the {} of"], "a part of the text is empty"),
        ([*scored, "--text", "the{ }people of"], "the query of row 0 is empty"),
        ([*scored, "--text", ""], "the text is empty"),
        ([*scored, "--text", "the {people of"], "do not match"),
        ([*scored, "--text", "the {people} of", "--given", "{another} text"], "is not the text"),
        ([*scored, "--file", tmp_path / "latin.txt"], "is not UTF-8"),
        ([*scored, "--file", tmp_path / "empty.txt"], "the text is empty"),
        ([*scored, "--file", tmp_path / "absent.txt"], "there is no file"),
        ([*scored, "--file", tmp_path / "latin.txt", "--given", "{x}"], "accepted: --given with --text"),
        (scored, "give either --text"),
        ([*scored, "--text", "the", "--order", "sideways"], "accepted: left_to_right"),
        ([*scored, "--text", "the " * 200 + "{end}"], "at most 64"),
        (["score", runs["plain"], "--text", "the {people} of"], "left to right only"),
        (evaluated, "give either --data DATA or --suite"),
        ([*of_data, "--suite", "zero-shot"], "give either --data DATA or --suite"),
        ([*evaluated, "--suite", "few-shot"], "unknown suite 'few-shot'; accepted: zero-shot"),
        ([*suite, "--sets", "c4"], "unknown set 'c4'"),
        ([*suite, "--file", f"ptb={tmp_path / 'latin.txt'}"], "not UTF-8"),
        ([*suite, "--file", "ptb=absent.txt"], "no file"),
        ([*of_data, "--sets", "ptb"], "accepted: them together with --suite"),
        ([*of_data, "--ensemble", "65"], "accepted: 2 to 64"),
        ([*of_data, "--contexts", "0"], "accepted: 1 or more"),
        ([*of_data, "--order", "sideways"], "accepted: left_to_right"),
        ([*of_data, "--limit", "0"], "limit is 0"),
        ([*of_data, "--figure", tmp_path / "x.png"], "accepted: it together with --ensemble"),
        ([*of_data, "--ensemble", "4", "--figure", tmp_path / "no" / "x.png"], "cannot be written"),
    ):
        assert said in refused(capsys, *arguments), arguments
