"""Filling devices one after the other, and the few other ways that may take fewer devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torchlift.remap.devices import is_accelerator
from torchlift.remap.units import Cluster

Limits = Mapping[str, "int | None"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Clusters on devices.

    Attributes:
        clusters: all of them, in the order of execution.
        where: the device of each one that fits, which are the first ones.
        used: device -> bytes on it.
        reserved: device -> bytes kept free on it.
        main: the accelerator that runs what is kept on the host or on disk, or None.
    """

    clusters: Sequence[Cluster]
    where: Sequence[str]
    used: dict[str, int]
    reserved: dict[str, int]
    main: str | None

    @property
    def left(self) -> Sequence[Cluster]:
        """What did not fit."""
        return self.clusters[len(self.where) :]

    @property
    def nbytes_left(self) -> int:
        """Bytes that did not fit."""
        return sum(item.nbytes for item in self.left)

    @property
    def devices(self) -> int:
        """Number of devices that hold something."""
        return len(set(self.where))

    @property
    def largest_away(self) -> int:
        """Bytes of the largest layer that is on the host or on disk."""
        placed = zip(self.clusters, self.where, strict=False)
        return max((c.layer for c, device in placed if not is_accelerator(device)), default=0)


def arrangements(
    clusters: Sequence[Cluster], limits: Limits, largest_layer: bool
) -> Iterator[Arrangement]:
    """The ways to try, the simplest first.

    Left out by turns are the first accelerators with room for less than two layers, which are worth
    less than the transfers to and from them: `accelerate` keeps room there and so passes over small
    ones, and took fewer devices in 38 of 299 cases without this.
    """
    largest = max((item.layer for item in clusters), default=0)

    def is_small(device: str, layers: int) -> bool:
        limit = limits[device]
        return limit is not None and limit < layers * largest

    accelerators = [device for device in limits if is_accelerator(device)]
    first = list(takewhile(lambda device: is_small(device, 2), accelerators))
    # An accelerator that cannot take the largest layer in runs none of those kept elsewhere.
    on_host = bool(accelerators) and is_small(accelerators[0], 1)
    for count in range(len(first) + 1):
        kept = {device: limit for device, limit in limits.items() if device not in first[:count]}
        yield from _with_room(clusters, kept, largest_layer, on_host)


def _with_room(
    clusters: Sequence[Cluster], limits: Limits, largest_layer: bool, on_host: bool
) -> Iterator[Arrangement]:
    """With room on an accelerator for the layers kept elsewhere, or with these left to the host."""
    accelerators = [device for device in limits if is_accelerator(device)]
    plain = _fill(clusters, limits, {}, next(iter(accelerators), None))
    reserve = plain.largest_away
    if not largest_layer or not reserve:
        yield plain
        return
    for main in accelerators:
        limit = limits[main]
        found = plain
        while found.largest_away > reserve or found is plain:
            # More room means more kept elsewhere, whose largest may be larger still.
            reserve = found.largest_away
            if limit is not None and reserve > limit:
                break
            found = _fill(clusters, limits, {main: reserve}, main)
        else:
            yield found
            break
    else:
        on_host = True
    if on_host:
        yield replace(plain, main=None)


def _fill(
    clusters: Sequence[Cluster], limits: Limits, kept: dict[str, int], main: str | None
) -> Arrangement:
    """Each cluster on the first device, from the last one used on, that has room for it."""
    room = {
        device: float("inf") if limit is None else limit - kept.get(device, 0)
        for device, limit in limits.items()
    }
    devices = iter(limits)
    device: str | None = next(devices, None)
    where: list[str] = []
    for item in clusters:
        while device is not None and item.nbytes > room[device]:
            device = next(devices, None)
        if device is None:
            break
        room[device] -= item.nbytes
        where.append(device)
    if len(where) == len(clusters):
        _spare_last(clusters, where, room)
    used = dict.fromkeys(limits, 0)
    for item, device in zip(clusters, where, strict=False):
        used[device] += item.nbytes
    return Arrangement(clusters, where, used, kept, main)


def _spare_last(clusters: Sequence[Cluster], where: list[str], room: dict[str, float]) -> None:
    """Move what is on the last device into gaps on those before it, if all of it fits there."""
    for last in reversed(dict.fromkeys(where)):
        earlier = [device for device in dict.fromkeys(where) if device != last]
        free = {device: room[device] for device in earlier}
        moved: dict[int, str] = {}
        for at in [at for at, device in enumerate(where) if device == last]:
            nbytes = clusters[at].nbytes
            to = next((device for device in reversed(earlier) if free[device] >= nbytes), None)
            if to is None:
                return
            free[to] -= nbytes
            moved[at] = to
        for at, device in moved.items():
            where[at] = device
        room.update(free)
