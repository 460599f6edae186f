"""``torchlift plan``: what goes where and what it takes, without any of the devices."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint
from torchlift._checkpoint import open as open_checkpoint
from torchlift._plan import DtypeRule, LoadPlan, Options, Rename, names_of, plan_only
from torchlift._system import human, printable
from torchlift.cli import UsageError
from torchlift.cli.factory import make_model
from torchlift.cli.output import print_json
from torchlift.distributed.meshes import parse_mesh
from torchlift.distributed.styles import STYLES, USUAL
from torchlift.remap import by_key, by_pattern, fit, rules, strip
from torchlift.remap.fitting import Fit, Inventory, placed, take
from torchlift.remap.maps import spelled


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = (
        "None of the devices needs to be there. With --model, names, shapes and ties are checked\n"
        "as torchlift.load would; --model imports and runs the module that you name.\n"
        "With --mesh, what each rank of a cluster reads: of the model's tensors where --model is\n"
        "given, else of all in the file. Its dimensions, the outermost first: fsdp (or dp_shard,\n"
        "shard, cp, ep), dp (or ddp, dp_replicate, replicate, hsdp), tp, pp. How tp cuts is known\n"
        "by name of the usual transformers; what it leaves whole for want of a name is listed.\n"
        "--tp 'head=0' says how to cut what else there is: a dimension, a style such as colwise\n"
        "or rowwise, or none; a * in the pattern stands for anything."
    )
    parser.add_argument("path", metavar="FILE", help="a checkpoint file or directory")
    parser.add_argument("--root", metavar="KEY", help="only this container of the file")
    parser.add_argument("--model", metavar="MODULE:FACTORY", help="what to load into")
    parser.add_argument("--no-strict", action="store_true", help="names need not all match")
    names = parser.add_argument_group("names, applied in this order")
    names.add_argument("--strip", metavar="PREFIX", action="append", default=[])
    names.add_argument("--rename", metavar="REGEX=REPLACEMENT", action="append", default=[])
    names.add_argument("--drop", metavar="REGEX", action="append", default=[])
    where = parser.add_argument_group("devices").add_mutually_exclusive_group()
    where.add_argument("--device", metavar="DEVICE", help="one for everything (default: cpu)")
    where.add_argument("--device-map", metavar="JSON", help="prefix -> device, or a file with it")
    where.add_argument(
        "--budget", metavar="DEVICE[=SIZE]", action="append", help="fill these, in this order"
    )
    parser.add_argument(
        "--no-split", metavar="NAME", action="append", default=[], help="with --budget: keep whole"
    )
    parser.add_argument(
        "--dtype", metavar="[REGEX=]DTYPE", action="append", default=[], help="cast to this"
    )
    parser.add_argument(
        "--mesh",
        metavar="DIM=N,...",
        help="what each rank would read, such as fsdp=1024,tp=8; goes with none of the devices",
    )
    parser.add_argument(
        "--tp",
        metavar="PATTERN=STYLE",
        action="append",
        default=[],
        help="how tp of --mesh cuts these; repeatable, the first match counts",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


@dataclass(frozen=True)
class _Found:
    inventory: Inventory
    placement: Fit
    plan: LoadPlan | None


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it."""
    try:
        rename, dtype = _rename(args), _dtype(args.dtype)
        mesh = _mesh(args)
        tp = _tp(args.tp, mesh)
        with open_checkpoint(args.path, root=args.root) as ckpt:
            if mesh is not None:
                return _on_mesh(args, mesh, ckpt, dtype, rename, tp)
            if args.model is None:
                inventory = take(ckpt, dtype, rename)
                found = _Found(inventory, _place(args, ckpt, inventory, dtype, rename), None)
            else:
                found = _with_model(args, make_model(args.model), ckpt, dtype, rename)
            if args.json:
                print_json(_to_dict(ckpt, found))
            else:
                print(printable(_to_text(ckpt, found), lines=True))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def _mesh(args: argparse.Namespace) -> dict[str, int] | None:
    """The mesh that was asked for, with nothing beside it that a mesh would ignore."""
    if args.mesh is None:
        return None
    for name in ("device", "device_map", "budget", "no_split"):
        if getattr(args, name) not in (None, []):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option}: not with --mesh: the ranks of a mesh have the devices that they have"
            )
    if args.no_strict and args.model is None:
        raise UsageError("--no-strict: needs --model with --mesh: nothing else has names to match")
    try:
        return parse_mesh(args.mesh)
    except ValueError as error:
        raise UsageError(f"--mesh: {error}") from error


def _tp(texts: list[str], mesh: dict[str, int] | None) -> dict[str, str | int | None]:
    """How tensor parallel cuts what is named, before what is known of the usual models."""
    if texts and "tp" not in (mesh or {}):
        raise UsageError("--tp: needs a --mesh with tp, such as fsdp=8,tp=2")
    found: dict[str, str | int | None] = {}
    for text in texts:
        pattern, equals, style = map(str.strip, text.rpartition("="))
        if not pattern or not equals:
            raise UsageError(f"--tp {text!r}: expected PATTERN=DIMENSION, such as 'head=0'")
        digits = style.removeprefix("-")
        if digits.isascii() and digits.isdecimal():
            found.setdefault(pattern, int(style[:20]))
        elif style == "none" or style in STYLES:
            found.setdefault(pattern, None if style == "none" else style)
        else:
            raise UsageError(
                f"--tp {text!r}: {style!r} is neither a dimension nor a style: none, "
                f"{', '.join(STYLES)}"
            )
    return {**found, "*": found.get("*", USUAL)}


def _on_mesh(
    args: argparse.Namespace,
    mesh: dict[str, int],
    ckpt: Checkpoint,
    dtype: DtypeRule,
    rename: Rename | None,
    tp: dict[str, str | int | None],
) -> int:
    """Print which bytes each rank of a mesh would read."""
    from torchlift.distributed.simulation import simulate

    model = make_model(args.model) if args.model is not None else None
    strict = not args.no_strict
    found = simulate(ckpt, mesh, model=model, rename=rename, dtype=dtype, strict=strict, tp=tp)
    useless = [text for text in args.tp if text.rpartition("=")[0].strip() in found.unused]
    if useless:
        raise UsageError(
            f"--tp {useless[0]!r}: it matches no parameter with such a dimension that none before "
            "it matches"
        )
    if args.json:
        print_json({"path": ckpt.path, "format": ckpt.format, **found.to_dict()})
    else:
        print(printable(f"{ckpt.path}\n{found}", lines=True))
    return 0


def _with_model(
    args: argparse.Namespace,
    model: nn.Module,
    ckpt: Checkpoint,
    dtype: DtypeRule,
    rename: Rename | None,
) -> _Found:
    options = Options(rename, None, dtype, strict=not args.no_strict, present=False)
    loaded = plan_only(model, ckpt, options).loaded
    # A meta tensor takes the checkpoint's dtype: the sizes are those of what will be loaded.
    becomes = {name: getattr(torch, report.dtype) for name, report in loaded.items()}
    inventory = take(model, lambda entry: becomes.get(entry.key), None)
    placement = _place(args, model, inventory, lambda entry: becomes.get(entry.key), None)
    options = Options(rename, placement, dtype, strict=not args.no_strict, present=False)
    return _Found(inventory, placement, plan_only(model, ckpt, options))


def _place(
    args: argparse.Namespace,
    source: nn.Module | Checkpoint,
    inventory: Inventory,
    dtype: DtypeRule,
    rename: Rename | None,
) -> Fit:
    if args.budget:
        budgets = dict(map(_budget, args.budget))
        return fit(source, budgets, args.no_split, dtype=dtype, rename=rename)
    asked = _device_map(args.device_map) if args.device_map else {"": args.device or "cpu"}
    rule = by_key(asked)
    rule.check(inventory.names, present=False)
    where = {name: spelled(rule.at(name) or "cpu") for name in inventory.names}
    return placed(inventory, where, dict.fromkeys(where.values()))


def _rename(args: argparse.Namespace) -> Rename | None:
    steps: list[Rename] = [strip(prefix) for prefix in args.strip]
    pairs: list[tuple[str, str | None]] = []
    for text in args.rename:
        pattern, equals, replacement = text.rpartition("=")
        if not equals:
            raise UsageError(f"--rename {text!r}: expected REGEX=REPLACEMENT")
        pairs.append((pattern, replacement))
    pairs += [(pattern, None) for pattern in args.drop]
    if pairs:
        steps.append(rules(pairs))
    if not steps:
        return None
    rename, *rest = steps
    for step in rest:
        rename = rename | step  # type: ignore[operator]
    return rename


def _dtype(texts: list[str]) -> DtypeRule:
    named = [text.rpartition("=")[::2] for text in texts]
    found: dict[str, torch.dtype] = {}
    for pattern, name in sorted(named, key=lambda pair: not pair[0]):  # the general one is last
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UsageError(f"--dtype {name!r}: not a floating-point dtype of torch")
        found[pattern] = dtype
    return by_pattern(found) if found else None


def _budget(text: str) -> tuple[str, str | None]:
    device, equals, size = text.partition("=")
    return device, size if equals else None


def _device_map(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    found = json.loads(text)  # its error is a ValueError
    if not isinstance(found, dict):
        raise UsageError("--device-map: expected an object of prefix -> device")
    return found


def _to_text(ckpt: Checkpoint, found: _Found) -> str:
    items = found.inventory.items
    dtypes = Counter(str(item.dtype).removeprefix("torch.") for item in items)
    counted = ", ".join(f"{name} ({count:,})" for name, count in dtypes.most_common())
    lines = [
        f"{ckpt.path}",
        f"  {len(items):,} tensors, {human(found.placement.nbytes)}: {counted}",
    ]
    lines += str(found.placement).split("\n")[1:]
    if found.plan is not None:
        lines += str(found.plan).split("\n")
    return "\n".join(lines)


def _to_dict(ckpt: Checkpoint, found: _Found) -> dict[str, Any]:
    placement, plan = found.placement, found.plan
    tensors = Counter(placement.at(item.names[0]) for item in found.inventory.items)
    data = {
        "path": ckpt.path,
        "format": ckpt.format,
        "tensors": len(found.inventory.items),
        "nbytes": placement.nbytes,
        "dtypes": dict(Counter(str(i.dtype).removeprefix("torch.") for i in found.inventory.items)),
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
        data["plan"] = {
            **names_of(plan),
            "bytes_to_read": plan.bytes_to_read,
            "peak_bytes": plan.peak_bytes,
        }
    return data
