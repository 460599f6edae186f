"""``torchlift plan``: what goes where, and what it takes, on a machine that has none of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torchlift
from torchlift._system.memory import free_memory
from torchlift._system.text import human
from torchlift.cli import UsageError, add_model, check_model, json_object
from torchlift.cli.output import report, spelled
from torchlift.cli.rules import add_dtype, add_names, check_names, dtype_of, rename_of
from torchlift.errors import PlacementError

if TYPE_CHECKING:
    from torchlift.remap import ByKey, Fit


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "None of the devices needs to be there. With --model, names, shapes and ties are checked\n"
        "as torchlift.load would; --model imports and runs the module that you name.\n"
        "With --mesh, the bytes that each rank of a cluster reads: the tensors of --model, or all\n"
        "tensors of the file. Without --parallelize, fsdp=N is fully_shard, and dp=N,fsdp=N is\n"
        "fully_shard with replicas. --parallelize names your own function of the model and the\n"
        "DeviceMesh, which calls fully_shard, parallelize_module and the like. It runs here, on a\n"
        "fake process group, for any dimensions: fsdp=1024,tp=8, or pp=4,dp_shard=64,tp=8. A mesh\n"
        "of more than 16 ranks is planned at its corners."
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
    _check(args)  # before what takes torch a second
    planned = _on_mesh if args.mesh is not None else _alone if args.model is None else _for_model
    try:
        # Otherwise as a whole: what is looked for below the root is told by its name in the file.
        root = args.root if planned is _alone else None
        with torchlift.open(args.path, root=root) as ckpt:
            text, data = planned(args, ckpt)
    except ValueError as error:
        raise UsageError(str(error)) from error
    path = ckpt.path
    report(args, f"{path}\n{text}", {"path": path, "format": ckpt.format, **data})
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


def _on_mesh(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, which bytes each rank of a mesh would read."""
    from torchlift.cli.factory import make_model, make_parallelize, search_working_folder

    model = make_model(args.model, args.model_args) if args.model is not None else None
    function = make_parallelize(args.parallelize) if args.parallelize is not None else None
    with search_working_folder():
        found = torchlift.distributed.simulate(
            ckpt,
            args.mesh,
            root=args.root,
            model=model,
            parallelize=function,
            rename=rename_of(args),
            dtype=dtype_of(args),
            strict=not args.no_strict,
        )
    return str(found), found.to_dict()


def _alone(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, what goes to which device."""
    rename, dtype = rename_of(args), dtype_of(args)
    found = torchlift.remap.fit(ckpt, _asked(args), args.no_split, dtype=dtype, rename=rename)
    text, data = _shown(found)
    free = free_memory()
    if found.budgets.get("cpu", 0) is None and free is not None:
        data["free_bytes"] = free
        text += f"\n  free memory here: {human(free)}"
    return text, data


def _for_model(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, what goes to which device, and how the model is loaded."""
    from torchlift.cli.factory import make_model

    model = make_model(args.model, args.model_args)

    def plan(device: ByKey[str] | None) -> torchlift.LoadPlan:
        return torchlift.plan(
            model,
            ckpt,
            root=args.root,
            rename=rename_of(args),
            device=device,
            dtype=dtype_of(args),
            strict=not args.no_strict,
            present=False,
        )

    # A meta tensor takes the checkpoint's dtype: the sizes are those of what will be loaded.
    becomes = {name: one.dtype for name, one in plan(None).loaded.items()}
    found = torchlift.remap.fit(
        model, _asked(args), args.no_split, dtype=lambda entry: becomes.get(entry.key)
    )
    text, data = _shown(found)
    planned = plan(found)
    planned = replace(planned, hint=spelled(planned.hint, args.parser._option_string_actions))
    return f"{text}\n{planned}", {**data, "plan": planned.to_dict()}


def _shown(found: Fit) -> tuple[str, dict[str, Any]]:
    data = found.to_dict()
    counted = ", ".join(f"{name} ({count:,})" for name, count in data["dtypes"].items())
    head = f"  {data['tensors']:,} tensors, {human(found.nbytes)}: {counted}"
    return "\n".join([head, *str(found).split("\n")[1:]]), data


def _asked(args: argparse.Namespace) -> dict[str, str | None] | ByKey[Any]:
    """Return the budgets, or the map, that the options make.

    Raises:
        UsageError: a value can be no device on any machine.
    """
    if args.budget:
        split = [text.partition("=") for text in args.budget]
        budgets = {device: size if equals else None for device, equals, size in split}
        if len(budgets) < len(split):
            raise UsageError("--budget: a device is given twice")
        if "meta" in budgets:
            raise UsageError("--budget: 'meta': the device holds no values")
        _map("--budget", dict(zip(budgets, budgets, strict=True)))
        return budgets
    if args.device_map is not None:
        return _map("--device-map", args.device_map)
    device = "cpu" if args.device is None else args.device
    return torchlift.remap.by_key({"": _map("--device", {device: device})[device]})


def _map(option: str, devices: dict[str, str]) -> ByKey[Any]:
    try:
        rule: ByKey[Any] = torchlift.remap.by_key(devices)
    except PlacementError as error:
        raise UsageError(f"{option}: {error}") from error
    import torch

    if any(isinstance(value, torch.dtype) for value in rule.values()):
        raise UsageError(f"{option}: expected devices; --dtype takes dtypes")
    return rule
