"""Coverage-guided fuzzing: one format for as long as libFuzzer is told to.

    PYTHONPATH=src:tests/support python tests/hostile/fuzz_targets.py every -max_total_time=60

Whatever bytes a file has, reading it and listing all of its content ends with an answer or with a
`CheckpointError` that knows its cause. Nothing is imported, run, written, or opened besides the
file itself. Memory stays within what a small file may cost.

An input is a list of parts (see `valid_files`), each behind its length.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import struct
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NoReturn

import atheris

with atheris.instrument_imports(include=["torchlift.formats"]):
    from checkpoint_files import assert_in_bounds
    from guarded import guard, look
    from valid_files import FORMATS, Parts, changed, write_valid

_LONGEST = 8192  # bytes of an input
_SHOWN = 8  # one input of so many is also listed in every form
_MEMORY = 256 << 20  # bytes above what the process has when it starts


# Inputs -------------------------------------------------------------------------------------------


def joined(parts: Parts) -> bytes:
    """The input that stands for these parts."""
    return b"".join(struct.pack("<H", len(part)) + part for part in parts)


def parts_of(data: bytes) -> Parts:
    """The parts that an input stands for; any bytes stand for some."""
    parts, at = [], 0
    while at + 2 <= len(data):
        (length,) = struct.unpack_from("<H", data, at)
        parts.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return parts


# Mutations ----------------------------------------------------------------------------------------


def mutated(data: bytes, longest: int, seed: int) -> bytes:
    """Another input, changed in one part or two: by libFuzzer, or as `changed` does it."""
    draw = random.Random(seed)
    parts = parts_of(data) or [b""]
    for _ in range(draw.choice((1, 1, 2))):
        at, kind = draw.randrange(len(parts)), draw.random()
        if kind < 0.1 and len(parts) > 2:
            other = draw.randrange(0, len(parts) - 1, 2)
            parts[other : other + 2] = draw.choice(([], parts[other : other + 2] * 2))
        elif kind < 0.4:
            parts[at] = changed(parts[at], draw)
        else:
            parts[at] = atheris.Mutate(parts[at], len(parts[at]) + 64)
    return joined(parts)[:longest]


def fuzz(name: str, options: list[str], folder: str) -> NoReturn:
    """Fuzz a format in a folder; the options are libFuzzer's, which ends the process."""
    place, corpus = Path(folder, "opened"), Path(folder, "corpus")
    corpus.mkdir()

    def one_input(data: bytes) -> None:
        path = write_valid(place, name, parts_of(data))
        with guard(place):
            # Listing takes as long as reading, and depends on little of what a file says.
            index = look(str(path), shown=zlib.crc32(data) % _SHOWN == 0)
            if index is not None:
                assert_in_bounds(index)

    for at, parts in enumerate(FORMATS[name][2](Path(folder, "made"))):
        Path(corpus, str(at)).write_bytes(joined(parts))
        one_input(joined(parts))  # whatever is imported when it is first used
    gc.collect()
    gc.freeze()  # what is imported is not walked through again and again
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = _MEMORY + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    options.sort(key=lambda option: not option.startswith("-"))  # folders come last
    fixed = [f"-max_len={_LONGEST}", "-timeout=10", "-print_final_stats=1"]
    atheris.Setup([name, *fixed, *options, str(corpus)], one_input, custom_mutator=mutated)
    atheris.Fuzz()
    raise AssertionError("libFuzzer came back")


def main() -> None:
    """Fuzz the format that the first argument names, or every one, each in a fork of its own."""
    name, *options = sys.argv[1:]
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for one in FORMATS if name == "every" else [name]:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            if (child := os.fork()) == 0:
                fuzz(one, options, folder)
            if os.waitpid(child, 0)[1]:
                sys.exit(f"{one}: the fuzzer found something, see above")


if __name__ == "__main__":
    main()
