"""``torchlift plan``: what goes where, and what it takes, on a machine that has none of it."""

from __future__ import annotations

import argparse

from torchlift.cli import UsageError, add_model, check_model, json_object
from torchlift.cli.output import report
from torchlift.cli.rules import add_dtype, add_names, check_names


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
    add_model(parser, "what to load into")
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


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    _check(args)
    from torchlift.cli.planning import answer  # which takes torch a second

    try:
        path, text, data = answer(args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    report(args, f"{path}\n{text}", {"path": path, **data})
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse options that mean nothing, or would be ignored beside the others."""
    check_model(args)
    if args.parallelize is not None and ":" not in args.parallelize:
        raise UsageError(f"--parallelize {args.parallelize!r}: expected MODULE:FUNCTION")
    if args.device_map is not None:
        args.device_map = json_object("--device-map", args.device_map)
    check_names(args)
    if args.no_split and not args.budget and args.mesh is None:
        raise UsageError("--no-split: needs --budget, such as --budget cuda:0=20GiB")
    if args.mesh is None:
        if args.parallelize is not None:
            raise UsageError("--parallelize: needs --mesh, such as --mesh fsdp=8,tp=2")
        return
    for name in ("device", "device_map", "budget", "no_split"):
        if getattr(args, name) not in (None, False, []):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option}: not with --mesh: the ranks of a mesh have the devices that they have"
            )
    if args.model is None and (args.no_strict or args.parallelize):
        option = "--no-strict" if args.no_strict else "--parallelize"
        raise UsageError(f"{option}: needs --model with --mesh: a file alone has no modules")
