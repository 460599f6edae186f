"""Compare loaders with other libraries and the limits of this machine, and draw what was measured.

    python tools/bench.py model.safetensors --json > run.json
    python tools/bench.py --grow modules --json --plot chart.png

The first adds ways to those of ``torchlift bench``. The second is in `growth`.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, product
from typing import Any

import charts
import growth
import machine
import torch
from torch import nn

import torchlift
from torchlift.bench import WAYS, Comparison, Result, Way, compare, loading

# ---- the limits of the machine: each makes the call to time, with all memory at hand

_READ = 8 << 20  # bytes per read into warm buffers
_AREA = 256 << 20  # bytes per buffer of the copying limit: far above any cache
_HUGE = 2 << 20
_CPUS = os.cpu_count() or 1

#: The limit of reading is the best of these plain readers: threads, past the page cache or through
#: it, into huge or small pages. Measured with 2.1 GB on 2 cores: none of them is the fastest both
#: warm and cold, and none is the fastest cold on every day.
PLAIN_READERS: tuple[tuple[int, bool, bool], ...] = tuple(
    product(
        (4, 8, 16, 32),
        (False, True) if hasattr(os, "O_DIRECT") else (False,),
        (True, False) if hasattr(mmap, "MADV_HUGEPAGE") else (False,),
    )
)


def name_of(reader: tuple[int, bool, bool]) -> str:
    """Return a plain reader in words."""
    threads, direct, huge = reader
    how, pages = "direct" if direct else "buffered", "huge" if huge else "small"
    return f"{threads} threads, {how}, {pages} pages"


def make_read(job: Any) -> Callable[[], None]:
    return partial(read_again, job.files, [bytearray(b"\1") * _READ for _ in range(_CPUS)])


def make_copy(job: Any) -> Callable[[], None]:
    size = min(_AREA, max(job.nbytes, 1))
    return partial(copy, *(bytearray(b"\1") * size for _ in range(2)), job.nbytes)


def make_plain(reader: tuple[int, bool, bool], job: Any) -> Callable[[], None]:
    kept: list[Any] = []  # giving memory back is not a part of the time
    return lambda: kept.extend(read_once(job.files, reader))


def make_pinned(job: Any) -> Callable[[], None]:
    source = torch.ones(_AREA, dtype=torch.uint8, pin_memory=True)
    return partial(copy_pinned, source, source.to(job.device), job.nbytes)


def read_again(files: Sequence[str], buffers: Sequence[bytearray]) -> None:
    """Read the files with one thread per CPU into small buffers whose pages exist already."""
    for name in files:
        with open(name, "rb", buffering=0) as file, ThreadPoolExecutor(len(buffers)) as pool:
            read = partial(os.preadv, file.fileno())
            turns = ([buffer] for buffer in cycle(buffers))
            list(pool.map(read, turns, range(0, os.path.getsize(name), _READ)))


def copy(source: bytearray, destination: bytearray, nbytes: int) -> None:
    """Copy as many bytes between two buffers that no cache holds, with a thread per CPU."""
    first, last = (ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in (source, destination))

    def share(number: int) -> None:
        left = nbytes
        while left > 0:
            size = min(left, len(source))
            start, end = (size * (number + more) // _CPUS for more in (0, 1))
            ctypes.memmove(last + start, first + start, end - start)
            left -= size

    with ThreadPoolExecutor(_CPUS) as pool:
        list(pool.map(share, range(_CPUS)))


def read_once(files: Sequence[str], reader: tuple[int, bool, bool]) -> list[mmap.mmap]:
    """Read the files once into memory that nobody has touched; return it, so that it stays.

    A thread waits in the kernel and copies there, without Python's lock: 16 MiB at a time for few
    threads, 8 for many, as a loop in C would.

    Raises:
        OSError: the file system does not read directly, or the file ended early.
    """
    threads, direct, huge = reader
    block = (16 if threads <= 8 else 8) << 20
    areas = []
    with ThreadPoolExecutor(threads) as pool:
        for name in files:
            size = os.path.getsize(name)
            area = mmap.mmap(-1, -(-size // _HUGE) * _HUGE or _HUGE, mmap.MAP_PRIVATE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                area.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
            areas.append(area)
            descriptor = os.open(name, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            try:
                read = partial(_read_block, descriptor, memoryview(area), block)
                got = sum(pool.map(read, range(0, size, block)))
            finally:
                os.close(descriptor)
            if got < size:
                raise OSError(f"{name}: {got} of {size} bytes could be read")
    return areas


def _read_block(descriptor: int, area: memoryview, block: int, start: int) -> int:
    at, end = start, min(start + block, len(area))
    while at < end:
        got = os.preadv(descriptor, [area[at:end]], at)
        if got == 0 or got % mmap.PAGESIZE:  # the end; a direct read could not go on from there
            return at + got - start
        at += got
    return at - start


def copy_pinned(source: torch.Tensor, destination: torch.Tensor, nbytes: int) -> None:
    """Copy as many bytes from pinned memory to the device as the tensors have."""
    for start in range(0, nbytes, _AREA):
        size = min(_AREA, nbytes - start)
        destination[:size].copy_(source[:size], non_blocking=True)


# ---- other libraries, called as their own pages show it

State = nn.Module | dict[str, torch.Tensor]


def accelerate_model(job: Any) -> State:
    """Load into a model on meta; accelerate maps what stays on the CPU as it is."""
    from accelerate import load_checkpoint_in_model

    model = job.build_on_meta()
    load_checkpoint_in_model(model, job.path, {"": str(job.device)}, dtype=job.dtype)
    return model


def safetensors_pread(job: Any) -> State:
    """Read every tensor with one call."""
    found = loading.safetensors_file(job, backend="pread")
    return {key: job.place(tensor) for key, tensor in found.items()}


def safetensors_model(job: Any) -> State:
    """Build a model with random weights and copy into it."""
    with job.device:
        model: nn.Module = job.build()
    model.load_state_dict(loading.safetensors_file(job))  # as load_model does, for all files
    return model


def transformers_model(job: Any, scratch: str) -> State:
    """Load a model of transformers whose modules are those of the file."""
    transformers: Any = importlib.import_module("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._modules.update(job.build()._modules)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """Leave what is loaded as it is."""

    folder, link = job.path, os.path.join(scratch, "model.safetensors")
    if not os.path.isdir(folder):
        folder = scratch
        if not os.path.exists(link):
            os.symlink(os.path.abspath(job.path), link)
    config, place = transformers.PretrainedConfig(), {"": str(job.device)}
    dtype = job.dtype or "auto"
    model: nn.Module = Model.from_pretrained(folder, config=config, device_map=place, dtype=dtype)
    return model


def runai(job: Any) -> State:
    """Stream all files; each tensor is a part of a buffer that is used again."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(job.files)
        return {key: job.place(tensor, copy=True) for key, tensor in streamer.get_tensors()}


def fastsafetensors(job: Any) -> State:
    """Read all files to the device; the tensors are parts of one buffer, which they keep."""
    from fastsafetensors import fastsafe_open

    options = {"device": str(job.device), "nogds": job.device.type != "cuda"}
    with fastsafe_open(job.files, **options) as opened:
        names: list[str] = opened.keys()  # it cannot be iterated over itself
        return {key: job.place(opened.get_tensor(key)) for key in names}


def instanttensor(job: Any, buffered: bool = False) -> State:
    """Read all files to a GPU, from the disk or through the page cache."""
    from instanttensor import BackendPolicy, safe_open

    backend = BackendPolicy.BUFFERED if buffered else None
    with safe_open(job.files, framework="pt", device=job.device, backend=backend) as opened:
        return {key: job.place(tensor) for key, tensor in opened.tensors()}


def tensorizer(job: Any) -> State:
    """Read a file of tensorizer's own."""
    from tensorizer import TensorDeserializer

    with TensorDeserializer(job.files[0], device=job.device, dtype=job.dtype) as tensors:
        return dict(tensors)


def make_tensorizer(scratch: str, job: Any) -> Callable[[], State]:
    """Write the tensors in its own format first; that file is the one to read."""
    from tensorizer import TensorSerializer

    path = os.path.join(scratch, "model.tensors")
    if not os.path.exists(path):
        with torchlift.open(job.path, root=job.root) as ckpt:
            serializer = TensorSerializer(path)
            serializer.write_state_dict(ckpt.state_dict())
            serializer.close()
    job.files = [path]
    return partial(tensorizer, job)


def make_peer(load_it: Callable[[Any], State], module: str, job: Any) -> Callable[[], State]:
    importlib.import_module(module)
    return partial(load_it, job)


# ---- the ways

_SAFE = ("safetensors", "sharded")


def ways_for(device: str, cast: str, scratch: str) -> dict[str, list[Way]]:
    """Return the ways that ``torchlift bench`` does not have: peers, plain readers, limits.

    Args:
        device: Device that every way loads to.
        cast: Dtype that every way casts to, or an empty text.
        scratch: Folder for additional files of a way.
    """
    is_read = bool(cast) or device != "cpu"  # else these two libraries map the file

    def peer(name: str, text: str, load_it: Any, package: str, reads: bool = True) -> Way:
        module = "transformers.modeling_utils" if name == "transformers" else package
        formats = ("torch-zip", *_SAFE) if name == "accelerate" else _SAFE
        function = partial(make_peer, load_it, module)
        return Way(name, text, function, formats, package, reads)

    peers = [
        peer("accelerate", "accelerate load_checkpoint_in_model", accelerate_model, "accelerate",
             is_read),
        peer("transformers", "transformers from_pretrained",
             partial(transformers_model, scratch=scratch), "transformers", is_read),
        peer("safetensors-pread", 'safetensors load_file, "pread"', safetensors_pread,
             "safetensors"),
        peer("safetensors-model", "build + safetensors load_model", safetensors_model,
             "safetensors"),
        peer("runai", "Run:ai model streamer + clone", runai, "runai_model_streamer"),
        peer("fastsafetensors", "fastsafetensors fastsafe_open", fastsafetensors,
             "fastsafetensors"),
        Way("tensorizer", "tensorizer, a file of its own", partial(make_tensorizer, scratch), (),
            "tensorizer"),
    ]  # fmt: skip
    limits = [
        Way("limit-read", "raw read into warm buffers", make_read),
        Way("limit-copy", "raw copy between warm buffers", make_copy),
    ]
    if device.startswith("cuda"):
        peers += [
            peer("instanttensor", "InstantTensor safe_open", instanttensor, "instanttensor"),
            peer("instanttensor-buffered", "InstantTensor safe_open, buffered",
                 partial(instanttensor, buffered=True), "instanttensor"),
        ]  # fmt: skip
    if device != "cpu":
        limits.append(Way("limit-pinned", "copy of pinned memory", make_pinned))
    plain = [Way(name_of(one), name_of(one), partial(make_plain, one)) for one in PLAIN_READERS]
    return {"peers": peers, "limits": limits, "plain": plain}


_FINALISTS = 4  # plain readers that take part after the first round


def compare_all(path: str, repeat: int, **options: Any) -> dict[str, Any]:
    """Return what ``torchlift bench --json`` prints, with the other ways and the limits."""
    folder = os.path.dirname(os.path.abspath(path))  # on the same disk
    with tempfile.TemporaryDirectory(prefix="torchlift-bench-", dir=folder) as scratch:
        more = ways_for(options["device"], options["cast"], scratch)
        first = compare(path, ways=more["plain"], repeat=1, **options)
        ran = [result for result in first.results.values() if not result.error]
        fastest = [result.way for result in sorted(ran, key=lambda r: r.median)[:_FINALISTS]]
        ways = [*WAYS, *more["peers"], *more["limits"], *fastest]
        found = compare(path, ways=ways, repeat=repeat, **options)
    left_out = {
        way.name: why
        for way in more["peers"]
        if (why := way.obstacle(found.format, options["device"], options["cast"]))
    }
    packages = sorted({found.results[name].way.package for name in found.results} - {""})
    return with_limit(found, first, [way.name for way in fastest]) | {
        "left_out": left_out,
        "machine": machine.describe(["torch", *packages]),
    }


def with_limit(found: Comparison, first: Comparison, names: Sequence[str]) -> dict[str, Any]:
    """Return the comparison with the best plain reader as one way, ``limit-plain``."""
    data = found.to_dict()
    readers = {name: result.seconds for name, result in first.results.items()}
    runs: dict[str, Result] = {name: found.results[name] for name in names}
    best = min(runs, key=lambda name: runs[name].median)
    rows = {name: data["results"].pop(name) for name in names}
    readers |= {name: row["seconds"] for name, row in rows.items()}
    data["results"]["limit-plain"] = rows[best] | {
        "summary": "plain reader into new memory", "best_reader": best, "readers": readers,
    }  # fmt: skip
    return data


def show(data: dict[str, Any]) -> str:
    """Return a line for each way."""
    lines = [f"{data['path']}: {data['nbytes'] / 1e6:.1f} MB"]
    for row in data["results"].values():
        text = f"failed: {row['error']}" if row["error"] else f"{row['median_seconds']:>10.4f} s"
        lines.append(f"{row['summary']:<40}{text}")
    lines += [f"left out: {name}: {why}" for name, why in data["left_out"].items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", nargs="?", help="a checkpoint file or folder")
    parser.add_argument("--grow", metavar="WHAT[=N,N]", help="tensors, modules or shards")
    parser.add_argument("--repeat", type=int, default=5, help="number of rounds")
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache")
    parser.add_argument("--cast", default="", help="dtype that every way casts to")
    parser.add_argument("--device", default="cpu", help="where every way loads to")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="OUT", help="draw a chart: .png, .svg or .pdf")
    args = parser.parse_args(arguments)
    if (args.path is None) == (args.grow is None):
        parser.error("give a checkpoint or --grow")
    if args.grow is None:
        data = compare_all(
            args.path, args.repeat, cold=args.cold, cast=args.cast, device=args.device
        )
        text = show(data)
    else:
        what, _, sizes = args.grow.partition("=")
        numbers = [int(size) for size in sizes.split(",")] if sizes else None
        found = growth.grow(what, sizes=numbers, repeat=args.repeat)
        data, text = found.to_dict(), str(found)
    print(json.dumps(data, indent=2, default=str) if args.json else text)
    if args.plot:
        charts.figure_of(data).savefig(args.plot, dpi=200)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
