"""What ``torchlift plan`` answers: its options as rules, and what follows from them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

import torchlift
from torchlift._system import human
from torchlift.cli import UsageError
from torchlift.cli.factory import make_model, make_parallelize
from torchlift.cli.output import spelled
from torchlift.cli.rules import dtype_of, rename_of
from torchlift.errors import PlacementError
from torchlift.remap import ByKey, Fit, by_key, fit


def answer(args: argparse.Namespace) -> tuple[str, str, dict[str, Any]]:
    """Return the checkpoint's path, and the plan as text and as data.

    Raises:
        UsageError, ValueError: an argument means nothing.
    """
    planned = _on_mesh if args.mesh is not None else _alone if args.model is None else _for_model
    # Otherwise as a whole: what is looked for below the root is told by its name in the file.
    with torchlift.open(args.path, root=args.root if planned is _alone else None) as ckpt:
        text, data = planned(args, ckpt)
        return ckpt.path, text, {"format": ckpt.format, **data}


def _on_mesh(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, which bytes each rank of a mesh would read."""
    found = torchlift.distributed.simulate(
        ckpt,
        args.mesh,
        root=args.root,
        model=make_model(args.model, args.model_args) if args.model is not None else None,
        parallelize=make_parallelize(args.parallelize) if args.parallelize is not None else None,
        rename=rename_of(args),
        dtype=dtype_of(args),
        strict=not args.no_strict,
    )
    return str(found), found.to_dict()


def _alone(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, what goes to which device."""
    rename, dtype = rename_of(args), dtype_of(args)
    return _shown(fit(ckpt, _asked(args), args.no_split, dtype=dtype, rename=rename))


def _for_model(args: argparse.Namespace, ckpt: torchlift.Checkpoint) -> tuple[str, dict[str, Any]]:
    """Return, as text and as data, what goes to which device, and how the model is loaded."""
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
    becomes = {name: getattr(torch, one.dtype) for name, one in plan(None).loaded.items()}
    found = fit(model, _asked(args), args.no_split, dtype=lambda entry: becomes.get(entry.key))
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
    return by_key({"": _map("--device", {device: device})[device]})


def _map(option: str, devices: dict[str, str]) -> ByKey[Any]:
    try:
        rule: ByKey[Any] = by_key(devices)
    except PlacementError as error:
        raise UsageError(f"{option}: {error}") from error
    if any(isinstance(value, torch.dtype) for value in rule.values()):
        raise UsageError(f"{option}: expected devices; --dtype takes dtypes")
    return rule
