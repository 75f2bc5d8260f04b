"""The zero-shot suite: its texts, brought into one form, from local files and from a hub that is played here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyorder as ao
from anyorder.data.tokenizer import Tokenizer
from anyorder.evaluation import zero_shot
from anyorder.evaluation.zero_shot import CONVENTIONS, NAMES, choose, read_set

ROWS = [
    "",
    " = The world = \n",
    "",
    " The \" people ' s \" law , of 1 @,@ 845 é a free @-@ world ( in our year ) ; it 's great . \n",
    " We must . \n",
]
LENGTH = 16


def write(path: Path, rows: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows), encoding="utf-8")
    return path


def tokens_of(blocks: Any) -> list[int]:
    return [token for number in range(len(blocks)) for token in blocks.rows([number])[0].tolist()]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "wikitext2",
            ' the " great " war ( 1845 ) , 1 @,@ 000 @-@ fold @.@ 5 : it \'s .',
            ' the "great" war (1845), 1,000-fold.5: it\'s .',
        ),
        ("wikitext103", " = = A title = = \n", " == A title ==\n"),
        ("ptb", "the u.s. ca n't pay $ N or N N to people 's <unk>", "the u.s. can't pay $1 or 1 1 to people's ?"),
        ("ptb", "N N N N", "N 1 1 N"),
        ("lambada", " “Go,” he said. ", '\n"Go," he said.'),
        (
            "lm1b",
            'He said , " no " ( in May ) at http : / / a.b / c ; is it $ 5 ?',
            'He said, "no" (in May) at http://a.b/c; is it $5?',
        ),
        ("lm1b", "They 're here .", "They're here."),
        ("ag_news", "as it is , ' s", "as it is , ' s"),
        ("arxiv", "we study , ( in part ) , the law .", "we study, (in part), the law."),
        ("pubmed", "mice [ n = 5 ] cost $ 3 / day .", "mice [n = 5] cost $3/day."),
    ],
)
def test_detokenizers(name: str, before: str, after: str) -> None:
    for convention in CONVENTIONS:
        assert CONVENTIONS[convention][name].detokenize(before) == after


def test_published_is_every_row_with_its_end_of_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = read_set("wikitext2", "published", tokenizer, LENGTH, write(tmp_path / "rows.jsonl", ROWS))
    expected = []
    for row in ROWS:
        text = CONVENTIONS["published"]["wikitext2"].detokenize(row)
        expected += [*tokenizer.encode(text), tokenizer.end_of_text]
    assert tokens_of(found) == expected
    assert expected.count(tokenizer.end_of_text) == len(ROWS)
    assert found.size(len(found) - 1) == (len(expected) % LENGTH or LENGTH)  # the tail is scored


def test_mdlm_wraps_the_same_stream(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    plain = tokens_of(read_set("wikitext2", "published", tokenizer, LENGTH, file))
    wrapped = read_set("wikitext2", "mdlm", tokenizer, LENGTH, file)
    inside: list[int] = []
    for number in range(len(wrapped)):
        begin, *middle, end = wrapped.rows([number])[0].tolist()
        assert begin == end == tokenizer.end_of_text
        assert len(middle) == LENGTH - 2 or number == len(wrapped) - 1
        inside += middle
    assert inside == plain


def test_every_kind_of_file_gives_the_same_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(row or "\n" for row in ROWS), encoding="utf-8")
    table = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"text": ROWS}), table)
    files = [write(tmp_path / "rows.jsonl", ROWS), lines, table]
    hashes = {read_set("wikitext2", "published", tokenizer, LENGTH, file).sha256 for file in files}
    assert len(hashes) == 1


def test_each_set_is_asked_of_the_hub_with_its_split(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: dict[str, tuple[Any, ...]] = {}
    now = ""

    def load_dataset(name: str, config: str | None, *, split: str, **rest: Any) -> list[dict[str, str]]:
        asked[now] = (name, config, split, rest["data_files"])
        return [{"text": "the people", "sentence": "of the", "article": "world"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for convention, wikitext2, usual in (("published", "train", "test"), ("mdlm", "validation", "validation")):
        hashes = []
        for now in NAMES:
            hashes.append(read_set(now, convention, tokenizer, LENGTH).sha256)  # type: ignore[arg-type]
        lambada = "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"
        assert asked == {
            "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", wikitext2, None),
            "wikitext103": ("Salesforce/wikitext", "wikitext-103-raw-v1", usual, None),
            "ptb": ("ptb-text-only/ptb_text_only", None, usual, None),
            "lambada": ("json", None, "train", lambada),
            "lm1b": ("dvruette/lm1b", None, "test", None),
            "ag_news": ("fancyzhx/ag_news", None, "test", None),
            "arxiv": ("armanc/scientific_papers", "arxiv", usual, None),
            "pubmed": ("armanc/scientific_papers", "pubmed", usual, None),
        }
        assert len(set(hashes)) == 4  # the column each reads, and LAMBADA's line before the text


def test_a_hub_out_of_reach_is_one_sentence(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ao.InputError, match="no network"):
        read_set("ptb", "published", tokenizer, LENGTH)


def test_choices() -> None:
    assert choose("zero-shot", [], []) == (NAMES, {})
    assert choose("zero-shot", ["ptb"], []) == (("ptb",), {})
    assert choose("zero-shot", [], ["ptb=a=b.txt", "lm1b=c"]) == (
        ("ptb", "lm1b"),
        {"ptb": Path("a=b.txt"), "lm1b": Path("c")},
    )
    for suite, sets, files, said in (
        ("few-shot", [], [], "unknown suite 'few-shot'; accepted: zero-shot"),
        ("zero-shot", ["c4"], [], "unknown set 'c4'; accepted: wikitext2"),
        ("zero-shot", [], ["c4=x"], "accepted: NAME=PATH"),
        ("zero-shot", [], ["ptb"], "accepted: NAME=PATH"),
        ("zero-shot", ["ptb"], ["lm1b=x"], "which --sets does not name"),
    ):
        with pytest.raises(ao.InputError, match=said):
            choose(suite, sets, files)


def test_empty_sets_and_short_models(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ao.InputError, match="accepted: 3 or more"):
        read_set("ptb", "mdlm", tokenizer, 2, write(tmp_path / "rows.jsonl", ["x"], "sentence"))
    with pytest.raises(ao.InputError, match="no text"):
        read_set("ptb", "mdlm", tokenizer, 8, write(tmp_path / "none.jsonl", []))
    with pytest.raises(ao.InputError, match="no file"):
        read_set("ptb", "mdlm", tokenizer, 8, tmp_path / "absent.jsonl")


def test_rows_go_in_windows(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.jsonl", [f"the people of {n}" for n in range(25)], "sentence")
    whole = read_set("ptb", "published", tokenizer, LENGTH, file).sha256
    monkeypatch.setattr(zero_shot, "ROWS", 4)
    assert read_set("ptb", "published", tokenizer, LENGTH, file).sha256 == whole
    assert np.iinfo(np.uint32).max > tokenizer.vocabulary
