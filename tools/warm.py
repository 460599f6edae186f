"""Compare a warm read with the clones of safetensors and torch, in alternated processes.

    python tools/warm.py --nbytes 2100000000 --repeat 7 --with OTHER/src

It says whether huge pages are slow or fast on this machine, because small pages are filled by
`torchlift._transfer.userfault` only if they are slow. A busy machine changes seconds, but less so
the time of the processors. So both are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import torch
from generated import Stack, make_checkpoint

_HERE = str(Path(__file__).resolve().parent.parent / "src")


def make_both(folder: str, nbytes: int, tensors: int) -> tuple[int, int, int]:
    """Write one checkpoint in both formats. Return the arguments of its model."""
    path = os.path.join(folder, "model")
    make_checkpoint(f"{path}.pt", nbytes=nbytes, tensors=tensors)
    return make_checkpoint(
        f"{path}.safetensors", nbytes=nbytes, tensors=tensors, format="safetensors"
    )


def load(way: str, folder: str, size: tuple[int, int, int], dtype: torch.dtype | None) -> object:
    """Load the checkpoint in one way, with its bytes in memory of the process."""
    if way == "safetensors + clone":
        from safetensors.torch import load_file

        state = load_file(os.path.join(folder, "model.safetensors"))
        return {key: value.to(dtype=dtype, copy=True) for key, value in state.items()}
    path = os.path.join(folder, "model.pt")
    if way == "torch mmap + clone":
        state = torch.load(path, mmap=True, weights_only=True)
        return {key: value.to(dtype=dtype, copy=True) for key, value in state.items()}
    import torchlift

    with torch.device("meta"):
        model = Stack(*size)
    torchlift.load(model, path, source="read", dtype=dtype)
    return model


def measure(way: str, folder: str, size: tuple[int, int, int], cast: str) -> list[float]:
    """Return wall and processor seconds of one load from the page cache, after the imports."""
    dtype = getattr(torch, cast) if cast else None
    small = os.path.join(folder, "small")
    load(way, small, (2, 8, 8), dtype)  # imports
    for name in os.listdir(folder):
        if name.startswith("model"):
            with open(os.path.join(folder, name), "rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass
    start, used = time.perf_counter(), time.process_time()
    kept = load(way, folder, size, dtype)
    seconds = [time.perf_counter() - start, time.process_time() - used]
    del kept
    return seconds


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nbytes", type=int, default=2_100_000_000, help="size of the checkpoint")
    parser.add_argument("--tensors", type=int, default=64, help="number of tensors")
    parser.add_argument("--cast", default="", help="dtype that every way casts to")
    parser.add_argument("--repeat", type=int, default=7, help="number of rounds")
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="SRC",
                        help="the src folder of another version of torchlift")  # fmt: skip
    parser.add_argument("--pause", type=float, default=0.0,
                        help="seconds before each run: free memory goes back to the host of a "
                        "virtual machine, and huge pages become slow")  # fmt: skip
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a child's call, as JSON
    args = parser.parse_args(arguments)
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return 0
    trees = dict.fromkeys((_HERE, *args.others))
    runs = [(f"torchlift of {tree}", tree) for tree in trees]
    runs += [("safetensors + clone", _HERE), ("torch mmap + clone", _HERE)]
    found: dict[str, list[list[float]]] = {name: [] for name, _ in runs}
    time.sleep(args.pause)
    print("huge pages:", machine.huge_pages())
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "small"))
        make_both(os.path.join(folder, "small"), 512, 2)
        size = make_both(folder, args.nbytes, args.tensors)
        for _ in range(args.repeat):
            for name, tree in runs:
                one = json.dumps([name, folder, size, args.cast])
                call = [sys.executable, __file__, "--one", one]
                environment = os.environ | {"PYTHONPATH": tree}
                time.sleep(args.pause)
                done = subprocess.run(call, env=environment, check=True, stdout=subprocess.PIPE)
                found[name].append(json.loads(done.stdout))
    time.sleep(args.pause)
    print("huge pages:", machine.huge_pages())
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    ours = medians[runs[0][0]]
    for name, (wall, processor) in medians.items():
        print(f"{name:<60} {wall:7.3f} s, {processor:7.3f} s of processors: "
              f"{wall / ours[0]:.2f} and {processor / ours[1]:.2f} times the first")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
