"""What a constructor asks about data (`.item()`, a mask as an index), answered while recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchlift import kinds
from torchlift.calls import Key, Ref, key_of, keys_of, tensors_in, version_of
from torchlift.replay import Run, quiet, slice_of
from torchlift.tape import Tape


def answer(
    tape: Tape,
    func: Callable[..., Any],
    recorded: tuple[Any, Any],
    inputs: list[torch.Tensor],
) -> Any:
    """Run a call on replayed values; its own writes are recorded like any other's."""
    result, real = _call_for_real(tape, func, *recorded)
    seen: dict[Key, None] = {}
    tape.as_recorded(inputs, seen)
    written = keys_of(
        t for t, (r, version) in zip(inputs, real, strict=True) if version_of(r) != version
    )
    back = {id(r): tensor for tensor, (r, _) in zip(inputs, real, strict=True)}
    known = set(keys_of(r for r, _ in real))
    # What the data shape is kept as it is. Anything else is made again with the rest, so that it
    # agrees with the random numbers of that time, and takes no memory until then.
    again = not kinds.is_shaped_by_data(func)
    result = _keep(tape, result, lambda t: again and key_of(t) not in known, back)
    tape.append(func, recorded, seen, written, tape.made(result, tape.device_of(inputs)))
    return result


def _keep(
    tape: Tape,
    value: Any,
    again: Callable[[torch.Tensor], bool],
    back: Mapping[int, torch.Tensor],
) -> Any:
    """`value` with real tensors replaced by meta ones."""
    if isinstance(value, torch.Tensor):
        if id(value) in back:
            return back[id(value)]
        if again(value):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return tape.adopt(value)
    if isinstance(value, (tuple, list)):
        items = [_keep(tape, item, again, back) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _call_for_real(
    tape: Tape, func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, list[tuple[torch.Tensor, int]]]:
    """One call on the CPU with real values, and its tensor arguments with their versions before.

    Random numbers drawn on the way are not taken from the caller's: asking does not change them.
    """
    run = Run(tape, torch.device("cpu"))
    refs = list(_refs((args, kwargs)))
    with quiet(run.device), _random_state_kept():
        for at in slice_of(tape, [(ref.key, len(tape.ops)) for ref in refs]):
            run.run(tape.ops[at])
        real_args, real_kwargs = run.value(args), run.value(kwargs)
        real = [(tensor, version_of(tensor)) for tensor in tensors_in((real_args, real_kwargs))]
        return func(*real_args, **real_kwargs), real


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    before = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
