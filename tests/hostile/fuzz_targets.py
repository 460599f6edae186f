"""Coverage-guided fuzzing: one format for as long as libFuzzer is told to.

    PYTHONPATH=src:tests/support python tests/hostile/fuzz_targets.py every -max_total_time=60

Whatever bytes a file has, `torchlift.open` and everything that lists its content ends with an
answer or with a `CheckpointError` that knows its cause; nothing is imported, run, written, or
opened besides the file itself; and memory stays within what a small file may cost.

An input is a list of parts (see `valid_files`), each behind its length.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickletools
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
    import torchlift.formats.summary

from checkpoint_files import assert_in_bounds
from guarded import guard, look
from valid_files import FORMATS, Parts

from torchlift.formats.index import Index

_LONGEST = 8192  # bytes of an input
_SHOWN = 8  # one input of so many is also listed in every form
_MEMORY = 256 << 20  # bytes above what the process has when it starts
_NUMBERS = [0, 1, 2, 3, 7, 63, 64, 65, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**40,
            2**60, 2**61 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]  # fmt: skip


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
    """Another input, changed in one part or two: as what it is, or as bytes."""
    draw = random.Random(seed)
    parts = parts_of(data) or [b""]
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(parts))
        part = parts[at]
        kind = draw.random()
        if kind < 0.08 and len(parts) > 2:
            other = draw.randrange(0, len(parts) - 1, 2)
            pair = parts[other : other + 2]
            parts[other : other + 2] = draw.choice(([], pair * 2))
        elif kind < 0.12:
            parts[at] = parts[draw.randrange(len(parts))]
        elif kind < 0.25 and len(part) > 8:
            number = struct.pack("<Q", draw.choice(_NUMBERS))[: draw.choice((1, 2, 4, 8))]
            place = draw.randrange(len(part))
            parts[at] = part[:place] + number + part[place + len(number) :]
        elif kind < 0.6 and part[:1] == b"{":
            parts[at] = _other_json(part, draw)
        elif kind < 0.6 and part[-1:] == b"." and part[:1] in b"\x80cl(]}":
            parts[at] = _other_pickle(part, draw)
        elif kind < 0.6 and part[:6] == b"\x93NUMPY":
            length = int.from_bytes(part[8:10], "little")
            text = atheris.Mutate(part[10 : 10 + length], length + 40)
            parts[at] = part[:8] + struct.pack("<H", len(text)) + text + part[10 + length :]
        else:
            parts[at] = atheris.Mutate(part, len(part) + 64)
    return joined(parts)[:longest]


_MADE = [
    *(bytes((code,)) for code in b"N)]}\x88(t\x85\x86\x87RbsueadlQ02.\x81\x8f\x90\x91\x92\x94"),
    b"K\x01", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"q\x00", b"h\x00",
    b"X\x01\0\0\0a",
    *(b"c" + name.encode() + b"\n" for name in (
        "torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_tensor_v3", "torch\nSize",
        "torch._utils\n_rebuild_parameter", "torch._tensor\n_rebuild_from_type_v2", "os\nsystem",
        "collections\nOrderedDict", "collections\ndefaultdict", "builtins\nset", "torch\nfloat16",
        "builtins\nbytearray", "_codecs\nencode", "numpy\ndtype", "torch.storage\nUntypedStorage",
    )),
]  # fmt: skip


def _other_pickle(data: bytes, draw: random.Random) -> bytes:
    """A pickle with an opcode removed, doubled, moved, or another one put in."""
    try:
        starts = [at for _, _, at in pickletools.genops(data)]
    except Exception:  # not a pickle any more
        return atheris.Mutate(data, len(data) + 64)
    codes = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, other = draw.randrange(len(codes)), draw.randrange(len(codes))
        kind = draw.randrange(5)
        if kind == 0 and len(codes) > 1:
            del codes[at]
        elif kind == 1:
            codes.insert(at, codes[other])
        elif kind == 2:
            codes[at], codes[other] = codes[other], codes[at]
        else:
            codes[at : at + (kind == 3)] = [draw.choice(_MADE)]
    return b"".join(codes)


_NAMES = ["", "a", "__metadata__", "\ud83d", "x\x1b[2J" * 9, "w" * 400, "F64", "../x", "a.st",
          "weight_0"]  # fmt: skip


def _other_json(data: bytes, draw: random.Random) -> bytes:
    """A JSON text with one value or name replaced, removed or doubled."""
    try:
        root = json.loads(data)
    except ValueError:
        return atheris.Mutate(data, len(data) + 64)
    places: list[tuple[object, object]] = []
    values = []

    def walk(value: object) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            places.append((value, key))
            values.append(inner)
            if isinstance(inner, (dict, list)):
                walk(inner)

    walk(root)
    if not places:
        return b'{"a": 1}'
    holder, key = draw.choice(places)
    kind = draw.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(["", "a", "__metadata__", "\ud83d", "x\x1b" * 9, "w" * 400])] = holder[
            key
        ]
    elif kind == 2:
        holder[key] = json.loads(json.dumps(draw.choice(values)))
    else:
        holder[key] = draw.choice([*_NUMBERS, *_NAMES, -1, None, True, 1.5, 1e300, [], {}, [[]]])
    return json.dumps(root, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")


# The property -------------------------------------------------------------------------------------


_open = torchlift.open  # which is imported when it is first looked up


def _opened(path: str) -> Index:
    """What `torchlift.open` finds, once everything that lists it has been asked."""
    with _open(path) as ckpt:
        keys = [*ckpt, *ckpt.objects, *ckpt.blocked_keys, *ckpt.aliases, *ckpt.blocked, repr(ckpt)]
        assert len(keys) > len(ckpt.entries)
        assert_in_bounds(ckpt._index)
        return ckpt._index


def fuzz(name: str, options: list[str], folder: str) -> NoReturn:
    """Fuzz a format in a folder; the options are libFuzzer's, which ends the process."""
    opened, make, seeds = FORMATS[name]
    place, corpus = os.path.join(folder, "opened"), os.path.join(folder, "corpus")
    os.mkdir(place)
    os.mkdir(corpus)
    files: dict[str, io.FileIO] = {}

    def one_input(data: bytes) -> None:
        for file, content in make(parts_of(data)).items():
            if file not in files:
                path = os.path.join(place, file)
                files[file] = open(path, "wb", buffering=0)  # noqa: SIM115 - kept open
            files[file].seek(0)
            files[file].write(content)
            files[file].truncate()
        with guard(place):
            # Listing takes as long as reading, and depends on little of what a file says.
            look(os.path.join(place, opened), _opened, shown=zlib.crc32(data) % _SHOWN == 0)

    for at, parts in enumerate(seeds(Path(folder, "made"))):
        Path(corpus, str(at)).write_bytes(joined(parts))
        one_input(joined(parts))  # whatever is imported when it is first used
    gc.collect()
    gc.freeze()  # what is imported is not walked through again and again
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = _MEMORY + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    options.sort(key=lambda option: not option.startswith("-"))  # folders come last
    fixed = [f"-max_len={_LONGEST}", "-timeout=10", "-print_final_stats=1"]
    atheris.Setup([name, *fixed, *options, corpus], one_input, custom_mutator=mutated)
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
