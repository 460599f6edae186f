"""``torchlift plan``: show what a load would do, on a machine without the devices."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torchlift
from torchlift._system.memory import free_memory
from torchlift._system.text import count_of, human
from torchlift.cli import UsageError
from torchlift.cli.output import report, spelled
from torchlift.cli.rules import add_dtype, add_names, check_device, check_names, dtype_of, rename_of

if TYPE_CHECKING:
    from torch import nn

    from torchlift.remap import ByKey, Fit


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "The devices need not exist here.\n"
        "--model checks names, shapes and ties as torchlift.load does. It imports and runs the\n"
        "module that you name.\n"
        "--ranks shows what each rank reads if fully_shard (FSDP) cuts all tensors in the file."
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")
    parser.add_argument("--root", metavar="KEY", help="load only this container of the file")
    parser.add_argument("--model", metavar="MODULE:FACTORY", help="the model to load into")
    parser.add_argument(
        "--model-args",
        metavar="JSON",
        help="keyword arguments of the factory, such as '{\"width\": 4}', or a file with them",
    )
    parser.add_argument("--no-strict", action="store_true", help="allow names that do not match")
    parser.add_argument(
        "--ignore-mismatched", action="store_true", help="skip tensors of another shape"
    )
    parser.add_argument(
        "--allow-missing",
        metavar="GLOB",
        action="append",
        default=[],
        help="allow names that match to be missing, or with --ignore-mismatched to have another "
        "shape; may be repeated",
    )
    add_names(parser)
    where = parser.add_argument_group("devices").add_mutually_exclusive_group()
    where.add_argument("--device", metavar="DEVICE", help="device of all tensors (default: cpu)")
    where.add_argument(
        "--device-map", metavar="JSON", help="prefix -> device as JSON, or a file with it"
    )
    where.add_argument(
        "--budget",
        metavar="DEVICE[=SIZE]",
        action="append",
        help="fill these devices in this order",
    )
    where.add_argument(
        "--ranks", type=int, metavar="N", help="show what each of N ranks of FSDP reads"
    )
    parser.add_argument(
        "--no-split",
        metavar="NAME",
        action="append",
        default=[],
        help="with --budget: modules to keep on one device",
    )
    add_dtype(parser)


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    _check(args)  # first: importing torch takes a second
    planned = _on_ranks if args.ranks else _alone if args.model is None else _for_model
    # With a model, the complete file is opened: errors then show the names of the file.
    root = args.root if planned is not _for_model else None
    with torchlift.open(args.path, root=root) as ckpt:
        text, data = planned(args, ckpt)
    path = ckpt.path
    report(args, f"{path}\n{text}", {"path": path, "format": ckpt.format, **data})
    return 0


def _check(args: argparse.Namespace) -> None:
    """Read what is JSON, and refuse options that are wrong or would have no effect."""
    if args.model is not None and ":" not in args.model:
        raise UsageError(f"--model {args.model!r}: expected MODULE:FACTORY")
    of_model = ("model_args", "no_strict", "ignore_mismatched", "allow_missing")
    for name in of_model if args.model is None else ():
        if getattr(args, name) not in (None, False, []):  # an empty text is an option, too
            raise UsageError(f"--{name.replace('_', '-')}: pass --model too")
    args.model_args = _read_json("--model-args", args.model_args or "{}")
    if args.device_map is not None:
        args.device_map = _read_json("--device-map", args.device_map)
    if args.no_split and not args.budget:
        raise UsageError("--no-split: pass --budget too, such as --budget cuda:0=20GiB")
    if args.ranks is not None and not 1 <= args.ranks <= 1 << 20:
        raise UsageError(f"--ranks {args.ranks}: expected a number from 1 to 1,048,576")
    if args.ranks and (args.model is not None or args.dtype):
        raise UsageError("--ranks: leave out --model and --dtype, which do not change what is read")
    check_names(args)


def _read_json(option: str, text: str) -> dict[str, Any]:
    """Parse a JSON object from a text, or from the file with this name."""
    if not text.lstrip().startswith("{"):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{option}: expected a JSON object")
    return found


def _on_ranks(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, the bytes that each rank of FSDP would read."""
    found = torchlift.distributed.simulate(ckpt, args.ranks, rename=rename_of(args))
    text = f"  {count_of(len(found), 'rank')} read {human(min(found))} to {human(max(found))} each"
    return text, {"bytes": found}


def _alone(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, the device of each part of the file."""
    rename, dtype = rename_of(args), dtype_of(args)
    found = torchlift.remap.fit(
        ckpt, _read_devices(args), args.no_split, dtype=dtype, rename=rename
    )
    text, data = _format_fit(found)
    free = free_memory()
    if found.budgets.get("cpu", 0) is None and free is not None:
        data["free_bytes"] = free
        text += f"\n  free memory here: {human(free)}"
    return text, data


def _for_model(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, the device of each module, and the plan of the load."""
    model = _make_model(args.model, args.model_args)

    def plan(device: ByKey[str] | None) -> torchlift.LoadPlan:
        return torchlift.plan(
            model,
            ckpt,
            root=args.root,
            rename=rename_of(args),
            device=device,
            dtype=dtype_of(args),
            strict=not args.no_strict,
            ignore_mismatched=args.ignore_mismatched,
            allow_missing=args.allow_missing,
            present=False,
        )

    # A meta tensor takes the checkpoint's dtype, so the sizes come from a plan.
    becomes = {name: one.dtype for name, one in plan(None).loaded.items()}
    found = torchlift.remap.fit(
        model, _read_devices(args), args.no_split, dtype=lambda entry: becomes.get(entry.key)
    )
    text, data = _format_fit(found)
    planned = plan(found)
    planned = replace(planned, hint=spelled(planned.hint, args.parser._option_string_actions))
    return f"{text}\n{planned}", {**data, "plan": planned.to_dict()}


def _format_fit(found: Fit) -> tuple[str, dict[str, Any]]:
    data = found.to_dict()
    counted = ", ".join(f"{name} ({count:,})" for name, count in data["dtypes"].items())
    head = f"  {data['tensors']:,} tensors, {human(found.nbytes)}: {counted}"
    return "\n".join([head, *str(found).split("\n")[1:]]), data


def _read_devices(args: argparse.Namespace) -> dict[str, str | None] | ByKey[str]:
    """Make the budgets or the map from the options.

    Raises:
        UsageError: If a device occurs twice.
    """
    for text in args.budget or ():
        check_device("--budget", text.partition("=")[0])
    if args.device is not None:
        check_device("--device", args.device)
    if args.budget:
        split = [text.partition("=") for text in args.budget]
        budgets = {device: size if equals else None for device, equals, size in split}
        if len(budgets) < len(split):
            raise UsageError("--budget: a device occurs twice")
        return budgets
    if args.device_map is not None:
        for device in args.device_map.values():
            check_device("--device-map", device)
        return torchlift.remap.by_key(args.device_map)
    return torchlift.remap.by_key({"": "cpu" if args.device is None else args.device})


# ---- the model


def _make_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Make a skeleton with the user's factory.

    Args:
        name: ``MODULE:FACTORY``.
        arguments: Its keyword arguments.

    Raises:
        UsageError: If the factory does not exist, or if it or its module raised an error.
    """
    try:
        with _search_working_folder():
            model: nn.Module = torchlift.skeleton(resolve_name(name), **arguments)
            return model
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"--model {name}: {text}") from error


@contextmanager
def _search_working_folder() -> Iterator[None]:
    """Look for modules in the working folder first. Processes that start here do it, too."""
    folder = os.getcwd()
    sys.path.insert(0, folder)  # Python put the command's own folder there
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
