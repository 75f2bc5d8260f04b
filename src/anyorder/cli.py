"""The command line. Errors of the user's are one sentence and exit code 2."""

import functools
import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import tyro

from anyorder.commands import bench, scoring, training, writing
from anyorder.errors import InputError, first_line
from anyorder.files import is_full

COMMANDS: dict[str, Any] = {
    "prepare": training.prepare,
    "train": training.train,
    "evaluate": scoring.evaluate,
    "score": scoring.score,
    "quality": scoring.quality,
    "fill": writing.fill,
    "sample": writing.sample,
    "import": training.import_,
    "bench": bench.bench,
}
DRAWING = re.compile("\x1b\\[[0-9;]*m|[\u2502\u256d\u256e\u2570\u256f]")  # colours and edges of the parser's boxes
RULE = re.compile("\u2500+")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ± gets a ?
    warnings.showwarning = lambda message, *_, **__: print(f"anyorder: warning: {message}", file=sys.stderr)
    try:
        _parse(arguments)()
        sys.stdout.flush()
    except InputError as error:
        return _fail(str(error))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return 141
    except OSError as error:
        if is_full(error):
            return _fail("no space left on the device; accepted: more room, or another folder")
        return _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        print("anyorder: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("ANYORDER_TRACEBACK"):
            raise
        if isinstance(error, MemoryError) or "allocate" in str(error):
            return _fail("there is not enough memory for this; accepted: a smaller model, batch or text")
        print(
            f"anyorder: error: a fault of the program's own, {type(error).__name__}: {first_line(error)}; "
            "ANYORDER_TRACEBACK=1 shows where",
            file=sys.stderr,
        )
        return 1
    return 0


def _parse(arguments: list[str] | None) -> Callable[[], None]:
    """Read the command line into a call that is still to be made, turning the parser's boxes into one sentence."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                {name: _deferred(command) for name, command in COMMANDS.items()},
                prog="anyorder",
                description="Language models that read and write in any order.",
                args=arguments,
            )
    except SystemExit as ended:
        if ended.code == 0:
            raise
        parts = [" ".join(part.split()) for part in RULE.split(DRAWING.sub(" ", said.getvalue()))]
        said_in_full = ", ".join(part for part in parts if part and "full helptext" not in part)
        sentence, _, _ = said_in_full.partition(" Got errors:")
        raise InputError(f"{sentence}; anyorder COMMAND --help says what is accepted") from None


def _deferred(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    @functools.wraps(command)
    def later(*positional: Any, **named: Any) -> Callable[[], None]:
        return lambda: command(*positional, **named)

    return later


def _fail(sentence: str) -> int:
    print(f"anyorder: error: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
