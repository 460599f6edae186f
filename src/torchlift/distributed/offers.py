"""What a checkpoint offers to one rank."""

from __future__ import annotations

from torchlift.distributed.shards import shard_of_entry, shard_of_value
from torchlift.errors import PlacementError
from torchlift.match import Candidate
from torchlift.place import repeats
from torchlift.slots import Group


def shard_of_offer(group: Group, offer: Candidate) -> Candidate:
    """The part of an offer that belongs to this rank's shard of a distributed tensor.

    Raises:
        PlacementError: elements share their bytes in the file, or the tensor has no shards.
    """
    if offer.entry is None:
        assert offer.value is not None
        return Candidate(offer.key, None, shard_of_value(offer.value, group.tensor, group.fqn))
    if repeats(offer.entry.shape, offer.entry.stride):
        raise PlacementError(
            "elements share their bytes in the file, so that no rank's part is a range of them",
            entry=group.fqn,
            found=f"strides {list(offer.entry.stride)}",
            hint="Save a contiguous() tensor.",
        )
    return Candidate(offer.key, shard_of_entry(offer.entry, group.tensor, group.fqn))
