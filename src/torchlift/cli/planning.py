"""What ``torchlift plan`` answers: its options as rules, and what follows from them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint
from torchlift._checkpoint import open as open_checkpoint
from torchlift._plan import DtypeRule, Options, Rename, names_of, plan_only
from torchlift._system import human
from torchlift.cli import UsageError
from torchlift.cli.factory import make_model, make_parallelize
from torchlift.cli.output import spelled
from torchlift.cli.rules import dtype_of, rename_of
from torchlift.errors import PlacementError
from torchlift.remap import by_key, fit
from torchlift.remap.fitting import Fit, Inventory, limits_of, placed, take
from torchlift.remap.maps import checked
from torchlift.remap.maps import spelled as spelled_device


def answer(args: argparse.Namespace) -> tuple[str, str, dict[str, Any]]:
    """Return the checkpoint's path, and the plan as text and as data.

    Raises:
        UsageError, ValueError: an argument means nothing.
    """
    rename, dtype = rename_of(args), dtype_of(args)
    planned = _on_devices if args.mesh is None else _on_mesh
    # As a whole: what is looked for below the root is told by its name in the file.
    with open_checkpoint(args.path) as ckpt:
        text, data = planned(args, ckpt, dtype, rename)
        return ckpt.path, text, {"format": ckpt.format, **data}


def _on_mesh(
    args: argparse.Namespace, ckpt: Checkpoint, dtype: DtypeRule, rename: Rename | None
) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, which bytes each rank of a mesh would read."""
    from torchlift.distributed import simulate

    found = simulate(
        ckpt,
        args.mesh,
        root=args.root,
        model=make_model(args.model, args.model_args) if args.model is not None else None,
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
        ckpt = Checkpoint(ckpt._index, root=args.root)
        inventory = take(ckpt, dtype, rename)
        placement = _place(args, ckpt, inventory, dtype, rename)
    else:
        model = make_model(args.model, args.model_args)
        options = Options(rename, None, dtype, strict=not args.no_strict, present=False)
        loaded = plan_only(model, ckpt, options, root=args.root).loaded
        # A meta tensor takes the checkpoint's dtype: the sizes are those of what will be loaded.
        becomes = {name: getattr(torch, report.dtype) for name, report in loaded.items()}
        inventory = take(model, lambda entry: becomes.get(entry.key), None)
        placement = _place(args, model, inventory, lambda entry: becomes.get(entry.key), None)
        plan = plan_only(model, ckpt, replace(options, device=placement), root=args.root)
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
        options = args.parser._option_string_actions
        lines.append(str(replace(plan, hint=spelled(plan.hint, options))))
        costs = {"bytes_to_read": plan.bytes_to_read, "peak_bytes": plan.peak_bytes}
        data["plan"] = {**names_of(plan), **costs}
    return "\n".join(lines), data


@contextmanager
def _means_a_device(option: str) -> Iterator[None]:
    """Make wrong usage of what can be no device on any machine."""
    try:
        yield
    except PlacementError as error:
        raise UsageError(f"{option}: {error}") from error


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
        if len(budgets) < len(split):
            raise UsageError("--budget: a device is given twice")
        with _means_a_device("--budget"):
            limits_of(budgets)
        return fit(source, budgets, args.no_split, dtype=dtype, rename=rename)
    device = "cpu" if args.device is None else args.device
    with _means_a_device("--device"):
        checked(device, device)
    with _means_a_device("--device-map"):
        rule = by_key({"": device} if args.device_map is None else args.device_map)
    if any(isinstance(value, torch.dtype) for value in rule.values()):
        raise UsageError("--device-map: expected devices; --dtype takes dtypes")
    rule.check(inventory.names, present=False)
    where = {name: spelled_device(rule.at(name) or "cpu") for name in inventory.names}
    return placed(inventory, where, dict.fromkeys(where.values()))
