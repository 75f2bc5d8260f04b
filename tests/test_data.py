"""Data: the same bytes everywhere, no token lost, nothing that looks finished and is not."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Backend

import anyorder as ao
from anyorder.data import prepare as prepare_module
from anyorder.data.batches import Batches, spread_chunks
from anyorder.data.corpora import Files, open_corpus
from anyorder.data.prepare import prepare, split_of
from anyorder.data.shards import ShardWriter, TokenStream, open_dataset
from anyorder.data.tokenizer import END_OF_TEXT, load_tokenizer, make_tokenizer
from anyorder.files import new_folder, remove_leftovers
from tests.conftest import flip, text, write_texts


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_bytes_for_any_number_of_workers_and_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "WINDOW", 5000)  # many small windows, so that workers overtake each other
    made = []
    for workers in (1, 2, 5):
        place = tmp_path / f"place{workers}"
        patterns = write_texts(place / "texts")
        prepare(open_corpus(patterns), place / "out", "bpe:300", validation=0.2, workers=workers)
        made.append(digest(place / "out"))
    assert made[0] == made[1] == made[2]
    assert set(made[0]) == {"manifest.json", "tokenizer.json", "train-00000.bin", "validation-00000.bin"}


def test_no_token_is_lost_and_documents_end(tmp_path: Path) -> None:
    patterns = write_texts(tmp_path / "texts")
    manifest = prepare(open_corpus(patterns), tmp_path / "out", "bpe:300", validation=0.2)
    data = open_dataset(tmp_path / "out")
    for split in ("train", "validation"):
        documents = [
            document
            for document in (p.read_text(encoding="utf-8") for p in sorted((tmp_path / "texts").iterdir()))
            if split_of(document, 0.2) == split
        ]
        stream = data.split(split, 1)
        described = manifest["splits"][split]
        assert data.tokenizer.decode(stream.read(0, len(stream)).tolist()) == "".join(
            d + END_OF_TEXT for d in documents
        )
        assert described["documents"] == len(documents)
        assert described["tokens"] == len(stream)
        assert described["bytes"] == sum(len(document.encode()) for document in documents)
        assert described["left_over_by_chunk_length"]["64"] == len(stream) % 64
        lengths = data.tokenizer.byte_lengths()
        assert lengths is not None
        assert lengths[stream.read(0, len(stream))].sum() == described["bytes"]


def test_a_document_that_spells_the_end_of_text_does_not_end_there(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bpe:300", iter([text(200, 0)]))
    tokens = tokenizer.encode(f"the {END_OF_TEXT} law")
    assert tokenizer.end_of_text not in tokens
    assert tokenizer.decode(tokens) == f"the {END_OF_TEXT} law"


def test_text_survives_each_kind_of_file(tmp_path: Path) -> None:
    documents = [text(50, seed) for seed in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": d}) + "\n" for d in documents), encoding="utf-8")
    parquet.write_table(pyarrow.table({"body": documents, "n": range(6)}), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        assert list(open_corpus([str(tmp_path / name)], column="body").documents()) == documents
    loaded = open_corpus([f"hf:{tmp_path / 'hub'}"], column="body")
    (tmp_path / "hub").mkdir()
    parquet.write_table(pyarrow.table({"body": documents}), tmp_path / "hub" / "train.parquet")
    assert list(loaded.documents()) == documents


def test_long_text_files_are_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    long = text(20_000, 1)
    path = tmp_path / "long.txt"
    path.write_text(long + "x" * 30_000, encoding="utf-8")
    pieces = list(Files((path,), "text", cut_text=4096).documents())
    assert "".join(pieces) == path.read_text(encoding="utf-8")
    assert len(pieces) > 20
    assert max(map(len, pieces)) <= 3 * 4096
    assert list(Files((path,), "text", cut_text=0).documents()) == [path.read_text(encoding="utf-8")]


def test_gpt2_encodes_as_gpt2_does() -> None:
    tokenizer = make_tokenizer("gpt2", iter([]))
    assert tokenizer.encode("Hello world, it's 2026") == [15496, 995, 11, 340, 338, 1160, 2075]
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (50257, 50256)


def test_shards_roll_over_and_read_across(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", np.dtype("<u2"), tokens_per_shard=10)
    for start in range(0, 35, 7):
        writer.append(np.arange(start, start + 7), size=7)
    described = writer.finish()
    assert [shard["tokens"] for shard in described["shards"]] == [10, 10, 10, 5]
    shards = tuple(np.fromfile(tmp_path / shard["file"], dtype="<u2") for shard in described["shards"])
    stream = TokenStream(shards, np.cumsum([0, *map(len, shards)]), 35)
    assert stream.read(8, 15).tolist() == list(range(8, 23))
    assert stream.chunks(np.array([0, 2]), 11).tolist() == [list(range(11)), list(range(22, 33))]
    for shard in described["shards"]:
        assert hashlib.sha256((tmp_path / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", np.dtype("<u4"))
    writer.append(np.array([0, 70_000]), size=1)
    writer.finish()
    assert np.fromfile(tmp_path / "train-00000.bin", dtype="<u4").tolist() == [0, 70_000]


def test_each_epoch_visits_each_chunk_once_in_its_own_order() -> None:
    stream = TokenStream((np.arange(1003),), np.array([0, 1003]), 1003)
    batches = Batches(stream, length=10, batch_size=20, seed=3)
    assert batches.count == 100
    epochs = [np.concatenate([batches.rows(step).numpy() for step in range(e * 5, e * 5 + 5)]) for e in range(2)]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(1000))
    assert epochs[0].tolist() != epochs[1].tolist()
    again = Batches(stream, length=10, batch_size=20, seed=3)
    assert again.rows(7).tolist() == batches.rows(7).tolist()  # no state: asked out of turn, the same
    whole = Batches(stream, length=10, batch_size=250, seed=3).rows(0)  # one batch of two and a half epochs
    assert sorted(whole.flatten().tolist()) == sorted([*list(range(1000)) * 2, *whole[200:].flatten().tolist()])


def test_spread_chunks_covers_the_stream() -> None:
    stream = TokenStream((np.arange(105),), np.array([0, 105]), 105)
    assert spread_chunks(stream, 10).flatten().tolist() == list(range(100))
    assert spread_chunks(stream, 10, 4)[:, 0].tolist() == [0, 20, 50, 70]


class Endless(Files):
    """A corpus that never ends, for preparations that are interrupted."""

    def documents(self) -> Iterator[str]:
        while True:
            yield from super().documents()

    def describe(self) -> dict[str, Any]:
        return {}


def test_an_exception_on_the_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = write_texts(tmp_path / "texts")
    monkeypatch.setattr(ShardWriter, "finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(open_corpus(patterns), tmp_path / "out", "bpe:300")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_killed_preparation_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts", documents=5)
    code = (
        "from pathlib import Path; from tests.test_data import Endless; from anyorder.data.prepare import prepare\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "prepare(Endless(tuple(sorted((folder / 'texts').iterdir())), 'text', 0), folder / 'out', "
        f"{str(make_tokenizer_file(tmp_path))!r}, validation=0.2)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.*.partial/train-*.bin")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    with pytest.raises(ao.InputError, match="does not exist and should be a data folder"):
        open_dataset(tmp_path / "out")
    prepare(open_corpus([str(tmp_path / "texts" / "*.txt")]), tmp_path / "out", "bpe:300", validation=0.4)
    assert not list(tmp_path.glob(".out.*"))  # what the killed one left is gone


def make_tokenizer_file(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(make_tokenizer("bpe:300", iter([text(300, 0)])).to_json(), encoding="utf-8")
    return path


def test_a_second_call_accepts_the_same_request_only(tmp_path: Path) -> None:
    patterns = write_texts(tmp_path / "texts")
    corpus = open_corpus(patterns)
    first = prepare(corpus, tmp_path / "out", "bpe:300", validation=0.2)
    assert prepare(corpus, tmp_path / "out", "bpe:300", validation=0.2) == first
    for changed, tokenizer, share, words in (
        (corpus, "bpe:400", 0.2, "tokenizer"),
        (corpus, "bpe:300", 0.3, "validation"),
        (open_corpus(patterns, cut_text=100), "bpe:300", 0.2, "cut_text"),
        (open_corpus(patterns, column="body"), "bpe:300", 0.2, "column"),
    ):
        with pytest.raises(ao.InputError, match=f"other {words}"):
            prepare(changed, tmp_path / "out", tokenizer, validation=share)
    file = tmp_path / "texts" / "000.txt"
    file.write_text(file.read_text(encoding="utf-8").upper(), encoding="utf-8")  # as long as before
    with pytest.raises(ao.InputError, match="other sources"):
        prepare(open_corpus(patterns), tmp_path / "out", "bpe:300", validation=0.2)


@pytest.mark.parametrize(
    "damage", ["missing", "short", "manifest", "bytes", "dtype", "request", "vocabulary", "tokenizer", "flip"]
)
def test_damaged_data_are_refused(tmp_path: Path, damage: str) -> None:
    prepare(open_corpus(write_texts(tmp_path / "texts")), tmp_path / "out", "bpe:300", validation=0.2)
    shard, manifest = tmp_path / "out" / "train-00000.bin", tmp_path / "out" / "manifest.json"
    match damage:
        case "missing":
            shard.unlink()
        case "short":
            shard.write_bytes(shard.read_bytes()[:-2])
        case "manifest":
            manifest.write_text(manifest.read_text()[:100])
        case "bytes":
            manifest.write_bytes(manifest.read_bytes()[:100] + b"\xff" + manifest.read_bytes()[101:])
        case "dtype":
            manifest.write_text(manifest.read_text().replace("<u2", "<f2"))
        case "tokenizer":
            make_tokenizer_file(tmp_path / "out")
        case "request":
            manifest.write_text(re.sub(r'"request": \{[^}]*\}[^}]*\}', '"request": 3', manifest.read_text()))
        case "vocabulary":
            manifest.write_text(re.sub(r'"vocabulary": \d+', '"vocabulary": "x"', manifest.read_text()))
        case "flip":
            flip(shard)
    with pytest.raises(ao.InputError):
        Batches(open_dataset(tmp_path / "out").split("train", 16), 16, 4, seed=0).rows(0)


def test_names_may_hold_brackets(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("the people")
    assert list(open_corpus([str(tmp_path / "a[1].txt")]).documents()) == ["the people"]


def test_the_folder_it_runs_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = open_corpus(write_texts(tmp_path / "texts"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ao.InputError, match="the folder this runs in"):
        prepare(corpus, Path(), "bpe:300", validation=0.2)


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    final = tmp_path / "data"

    def write() -> None:
        with new_folder(final, ""):
            final.mkdir()
            (final / "manifest.json").write_text("another's")

    with pytest.raises(ao.InputError, match="written by another process meanwhile"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (final / "manifest.json").read_text() == "another's"


def test_one_preparation_does_not_remove_anothers_work(tmp_path: Path) -> None:
    final = tmp_path / "data"
    with new_folder(final, "") as first:
        (tmp_path / ".data.v2.xyz.partial").mkdir()  # of a folder named data.v2
        dead = tmp_path / ".data.xyz.partial"
        dead.mkdir()
        remove_leftovers(final)
        assert first.exists()
        assert (tmp_path / ".data.v2.xyz.partial").exists()
        assert not dead.exists()
    assert final.is_dir()


def test_a_tokenizers_own_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    path = make_tokenizer_file(tmp_path)
    backend = Backend.from_file(str(path))
    backend.enable_truncation(8)
    backend.enable_padding(length=64)
    backend.save(str(path))
    assert load_tokenizer(path).encode(text(50, 0)) == make_tokenizer("bpe:300", iter([text(300, 0)])).encode(
        text(50, 0)
    )


def test_tokenizer_file_round_trip(tmp_path: Path) -> None:
    path = make_tokenizer_file(tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.to_json() == path.read_text(encoding="utf-8")
    assert tokenizer.decode(tokenizer.encode("the café “law”\n\n")) == "the café “law”\n\n"
