"""``torchlift plan``: what goes where and what it takes, without any of the devices."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint
from torchlift._checkpoint import open as open_checkpoint
from torchlift._plan import DtypeRule, Options, Rename, names_of, plan_only
from torchlift._system import human, printable
from torchlift.cli import UsageError
from torchlift.cli.factory import make_model, make_parallelize
from torchlift.cli.output import print_json
from torchlift.cli.rules import add_dtype, add_names, dtype_of, rename_of
from torchlift.remap import by_key, fit
from torchlift.remap.fitting import Fit, Inventory, placed, take
from torchlift.remap.maps import spelled


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "None of the devices needs to be there. With --model, names, shapes and ties are checked\n"
        "as torchlift.load would; --model imports and runs the module that you name.\n"
        "With --mesh, what each rank of a cluster reads: of the model's tensors where --model is\n"
        "given, else of all in the file. Without --parallelize, fsdp (or dp_shard, shard, cp, ep)\n"
        "shards every parameter along its first dimension, and dp (or ddp, dp_replicate,\n"
        "replicate, hsdp) replicates. --parallelize names your own function of the model and the\n"
        "DeviceMesh, which calls fully_shard, parallelize_module and the like; it runs here, on a\n"
        "fake process group, for any dimensions: fsdp=1024,tp=8, or pp=4,dp_shard=64,tp=8."
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")
    parser.add_argument("--root", metavar="KEY", help="only this container of the file")
    parser.add_argument("--model", metavar="MODULE:FACTORY", help="what to load into")
    parser.add_argument("--no-strict", action="store_true", help="names need not all match")
    add_names(parser)
    where = parser.add_argument_group("devices").add_mutually_exclusive_group()
    where.add_argument("--device", metavar="DEVICE", help="one for everything (default: cpu)")
    where.add_argument("--device-map", metavar="JSON", help="prefix -> device, or a file with it")
    where.add_argument(
        "--budget", metavar="DEVICE[=SIZE]", action="append", help="fill these, in this order"
    )
    parser.add_argument(
        "--no-split", metavar="NAME", action="append", default=[], help="with --budget: keep whole"
    )
    add_dtype(parser)
    parser.add_argument(
        "--mesh",
        metavar="DIM=N,...",
        help="what each rank would read, such as fsdp=1024; goes with none of the devices",
    )
    parser.add_argument(
        "--parallelize", metavar="MODULE:FUNCTION", help="what distributes the model over --mesh"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    try:
        _check(args)
        rename, dtype = rename_of(args), dtype_of(args)
        answer = _on_devices if args.mesh is None else _on_mesh
        with open_checkpoint(args.path, root=args.root) as ckpt:
            text, data = answer(args, ckpt, dtype, rename)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.json:
        print_json({"path": ckpt.path, "format": ckpt.format, **data})
    else:
        print(printable(f"{ckpt.path}\n{text}", lines=True))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that would be ignored beside the others."""
    if args.mesh is None:
        if args.parallelize is not None:
            raise UsageError("--parallelize: needs --mesh, such as --mesh fsdp=8,tp=2")
        return
    for name in ("device", "device_map", "budget", "no_split"):
        if getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option}: not with --mesh: the ranks of a mesh have the devices that they have"
            )
    if args.model is None and (args.no_strict or args.parallelize):
        option = "--no-strict" if args.no_strict else "--parallelize"
        raise UsageError(f"{option}: needs --model with --mesh: a file alone has no modules")


def _on_mesh(
    args: argparse.Namespace, ckpt: Checkpoint, dtype: DtypeRule, rename: Rename | None
) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, which bytes each rank of a mesh would read."""
    from torchlift.distributed import simulate

    found = simulate(
        ckpt,
        args.mesh,
        model=make_model(args.model) if args.model is not None else None,
        parallelize=make_parallelize(args.parallelize) if args.parallelize is not None else None,
        rename=rename,
        dtype=dtype,
        strict=not args.no_strict,
    )
    return str(found), found.to_dict()


def _on_devices(
    args: argparse.Namespace, ckpt: Checkpoint, dtype: DtypeRule, rename: Rename | None
) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, what goes to which device, and with a model how it is loaded."""
    plan = None
    if args.model is None:
        inventory = take(ckpt, dtype, rename)
        placement = _place(args, ckpt, inventory, dtype, rename)
    else:
        model = make_model(args.model)
        options = Options(rename, None, dtype, strict=not args.no_strict, present=False)
        loaded = plan_only(model, ckpt, options).loaded
        # A meta tensor takes the checkpoint's dtype: the sizes are those of what will be loaded.
        becomes = {name: getattr(torch, report.dtype) for name, report in loaded.items()}
        inventory = take(model, lambda entry: becomes.get(entry.key), None)
        placement = _place(args, model, inventory, lambda entry: becomes.get(entry.key), None)
        plan = plan_only(model, ckpt, replace(options, device=placement))
    items = inventory.items
    dtypes = Counter(str(item.dtype).removeprefix("torch.") for item in items)
    counted = ", ".join(f"{name} ({count:,})" for name, count in dtypes.most_common())
    lines = [f"  {len(items):,} tensors, {human(placement.nbytes)}: {counted}"]
    lines += str(placement).split("\n")[1:]
    tensors = Counter(placement.at(item.names[0]) for item in items)
    data = {
        "tensors": len(items),
        "nbytes": placement.nbytes,
        "dtypes": dict(dtypes),
        "devices": {
            device: {
                "tensors": tensors[device],
                "used": placement.used[device],
                "budget": budget,
                "reserved": placement.reserved.get(device, 0),
                "contents": placement.contents[device],
            }
            for device, budget in placement.budgets.items()
        },
        "main_device": placement.main,
        "device_map": dict(placement),
    }
    if plan is not None:
        lines.append(str(plan))
        costs = {"bytes_to_read": plan.bytes_to_read, "peak_bytes": plan.peak_bytes}
        data["plan"] = {**names_of(plan), **costs}
    return "\n".join(lines), data


def _place(
    args: argparse.Namespace,
    source: nn.Module | Checkpoint,
    inventory: Inventory,
    dtype: DtypeRule,
    rename: Rename | None,
) -> Fit:
    if args.budget:
        split = [text.partition("=") for text in args.budget]
        budgets = {device: size if equals else None for device, equals, size in split}
        return fit(source, budgets, args.no_split, dtype=dtype, rename=rename)
    asked = _device_map(args.device_map) if args.device_map else {"": args.device or "cpu"}
    rule = by_key(asked)
    rule.check(inventory.names, present=False)
    where = {name: spelled(rule.at(name) or "cpu") for name in inventory.names}
    return placed(inventory, where, dict.fromkeys(where.values()))


def _device_map(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    found = json.loads(text)  # its error is a ValueError
    if not isinstance(found, dict):
        raise UsageError("--device-map: expected an object of prefix -> device")
    return found
