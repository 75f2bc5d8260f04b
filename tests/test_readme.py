"""The README's Python example runs as it is written."""

import re
from pathlib import Path

import pytest

from anyorder.cli import main
from anyorder.data.shards import Dataset

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example_runs(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ["--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "4", "--steps", "2"]
    assert main(["train", "tiny", "--data", str(data.folder), "--out", "runs/demo", *shape]) == 0
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    capsys.readouterr()
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "nats along [" in printed
    assert printed.rstrip().endswith(" 3")  # three passes for three blanks
