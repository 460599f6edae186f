"""Read files of strangers under guard: nothing but the files is opened, little is spent.

In this process (`look` within `guard`), or in a child that counts the calls and the
memory that reading, verifying and showing a file takes (`answers`). Both are bounded by a sum and a
multiple of the bytes on disk; the time limit is only a net below that.
"""

from __future__ import annotations

import html  # noqa: F401 - what is imported when it is first used is imported before a file is read
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torchlift._system.text import printable
from torchlift.errors import CheckpointError
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index
from torchlift.formats.integrity import verify_index
from torchlift.formats.summary import to_html, to_json, to_text
from torchlift.formats.table import ARCHIVES, FILES, FOLDERS, load

# A reader is imported when its format is met, and the guard lets nothing be imported.
for _row in (*FILES, *ARCHIVES, *FOLDERS):
    load(_row.reader)
load("torchlift.formats.folders.read_folder")

for _codec in ("raw-unicode-escape", "unicode_escape", "latin1"):
    "x".encode(_codec).decode(_codec)


class Escaped(BaseException):
    """Something happened that no file may make happen; no handler of errors catches it."""


#: Looking around, parsing a literal, and what the guard itself does.
_HARMLESS = {
    "os.listdir", "os.scandir", "compile", "builtins.id", "object.__getattr__", "sys.setprofile",
    "sys._getframe", "mmap.__new__", "_thread.start_new_thread",
}  # fmt: skip
_roots: list[str] = []
_is_watching = False


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if not _roots or event in _HARMLESS:
        return
    if event == "open" and str(arguments[0]).startswith(tuple(_roots)):
        flags = arguments[2]
        assert isinstance(flags, int)
        if not flags & (os.O_ACCMODE | os.O_CREAT):
            return
    raise Escaped(event, arguments)


@contextmanager
def guard(*roots: str | os.PathLike[str]) -> Iterator[None]:
    """Let nothing be imported, run, started, connected to, changed, or opened but these files."""
    global _is_watching
    if not _is_watching:
        sys.addaudithook(_watch)  # for the rest of the process
        _is_watching = True
    _roots.extend([*map(os.path.realpath, roots), *map(os.fspath, roots)])
    try:
        yield
    finally:
        _roots.clear()


def look(path: str, *, shown: bool = True) -> Index | None:
    """Read a file that may be damaged; None if it is refused, as it must be.

    Args:
        path: the file.
        shown: whether all of it is listed in every form, too.
    """
    index, refusal, text = None, None, ""
    try:
        index = read_index(path)
        if shown:
            text = to_text(index)
            to_html(index)
            json.dumps(to_json(index))
        assert index.aliases is not None
    except CheckpointError as caught:
        refusal, text = caught, str(caught)
    assert printable(text, lines=refusal is None) == text
    if refusal is not None:
        assert refusal.file is not None
        assert refusal.reason != "the file is damaged", repr(
            refusal.__cause__
        )  # its cause is known
        assert len(text) < 4000
    return index


class Answer(NamedTuple):
    """What a child found: the class of the error, or ``Index``; the entry; the words."""

    kind: str
    entry: str | None
    text: str


def answers(*paths: Path) -> list[Answer]:
    """What a child makes of files; fails where that takes too much, or anything else happens."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", "import guarded; guarded.main()", *map(str, paths)],
        env=environment, capture_output=True, text=True, timeout=60 * len(paths), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [Answer(*json.loads(line)) for line in done.stdout.splitlines()]


class _Exceeded(BaseException):
    pass


_left = 0


def _counted(*_: object) -> None:
    global _left
    _left -= 1
    if _left < 0:
        sys.setprofile(None)
        raise _Exceeded


def _stored(path: str) -> int:
    if os.path.isdir(path):
        return sum({e.inode(): e.stat().st_size for e in os.scandir(path)}.values())
    return os.path.getsize(path)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _answer(path: str) -> Answer:
    global _left
    stored, before = _stored(path), _peak()
    _left = 12_000_000 + 32 * stored
    is_wrong = False
    sys.setprofile(_counted)
    try:
        with guard(path if os.path.isdir(path) else os.path.dirname(path)):
            index = read_index(path)
            verify_index(index), to_text(index), to_html(index), json.dumps(to_json(index))
            blocked = printable(", ".join(index.blocked), 300)
            found = Answer("Index", None, f"read, without {blocked}" if blocked else "read")
    except CheckpointError as error:
        is_wrong = error.file is None or isinstance(error.__cause__, MemoryError)
        found = Answer(type(error).__name__, error.entry, str(error))
    finally:
        sys.setprofile(None)
    assert not is_wrong, found
    assert len(found.text) < 4000, len(found.text)
    assert found.text.isprintable(), found.text
    grown = _peak() - before
    assert grown < (64 << 20) + 160 * stored, (path, grown, found.text[:200])
    return found


def main() -> None:
    """Print the answer for each path of the command line."""
    for path in sys.argv[1:]:
        print(json.dumps(_answer(path)))
