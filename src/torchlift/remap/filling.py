"""Filling devices one after the other, and the few other ways that may take fewer devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
    yield _with_room(clusters, limits, largest_layer)
    largest = max((item.layer for item in clusters), default=0)
    for device, limit in limits.items():
        if not is_accelerator(device):
            continue
        if limit is None or limit >= 2 * largest:
            return
        limits = {name: limit for name, limit in limits.items() if name != device}
        yield _with_room(clusters, limits, largest_layer)


def _with_room(clusters: Sequence[Cluster], limits: Limits, largest_layer: bool) -> Arrangement:
    """With room on the first accelerator for each layer kept elsewhere, or these left to the host."""
    main = next(filter(is_accelerator, limits), None)
    plain = found = _fill(clusters, limits, {}, main)
    reserve = 0
    while largest_layer and found.largest_away > reserve:
        # More room means more kept elsewhere, whose largest may be larger still.
        reserve = found.largest_away
        limit = 0 if main is None else limits[main]
        if main is None or (limit is not None and reserve > limit):
            return replace(plain, main=None)
        found = _fill(clusters, limits, {main: reserve}, main)
    return found


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
