"""Writing so that what has a final name is whole: temporary names, sync, rename."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anyorder.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def new_folder(final: Path, survives: str) -> Iterator[Path]:
    """Fill a temporary folder beside `final`; synced and renamed to it at the end, removed on any failure.

    `survives` ends the sentence that a full disk gives: what is still there.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    lock = os.open(temporary, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # says that whoever fills it is alive
        temporary.chmod(0o755)
        yield temporary
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        try:
            temporary.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise InputError(f"{final} was written by another process meanwhile; accepted: one at a time") from None
        sync(final.parent)
    except BaseException as error:
        # torch reports a full disk as an error about file positions, and some of its errors are no Exceptions
        of_its_own = isinstance(error, InputError | KeyboardInterrupt | SystemExit | GeneratorExit)
        full = is_full(error) or (not of_its_own and _has_no_room(temporary))
        shutil.rmtree(temporary, ignore_errors=True)
        if full:
            raise InputError(f"no space left on the device while writing {final}; {survives}") from error
        raise
    finally:
        os.close(lock)


def remove_leftovers(final: Path) -> None:
    """Remove what killed processes left behind of `final`, but not what a living one is filling."""
    pattern = re.compile(rf"\.{re.escape(final.name)}\.[^.]+\.partial")
    for leftover in [path for path in final.parent.iterdir() if pattern.fullmatch(path.name)]:
        lock = os.open(leftover, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def is_full(error: BaseException | None) -> bool:
    """Tell whether an error, or one that it came from, says that the disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _has_no_room(folder: Path) -> bool:
    """Tell whether the disk refuses another MiB."""
    try:
        (folder / "probe").write_bytes(bytes(2**20))
    except OSError as error:
        return error.errno in FULL
    return False


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one step; write through a link or a device."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)
