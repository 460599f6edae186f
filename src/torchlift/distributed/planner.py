"""Let ``torch.distributed.checkpoint.load`` load what is there, and list the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import getitem
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchlift._plan.names import Match
from torchlift._plan.planner import check_names
from torchlift._plan.report import Mismatch, list_names
from torchlift._plan.rules import Options, Patterns
from torchlift._plan.suggest import suggest_rename
from torchlift._system.containers import leaves, map_leaves
from torchlift._system.text import Facts, Summary, clipped_list, count_of
from torchlift.errors import Hint, MismatchError


class LenientPlanner(Summary, DefaultLoadPlanner):
    """Load what a checkpoint has for a state dict, and list the rest, in one error or in none.

    For ``torch.distributed.checkpoint.load``, with torch's own readers and with `CheckpointReader`.
    What does not fit is compared over all ranks before anything is read: one error names all of it,
    and every rank raises it, or goes on with the same lists. torch's planner ends at the first
    missing key or other shape (pytorch/pytorch#148252); with ``allow_partial_load=True`` it skips
    what is missing without a word, even where no name fits at all, and what is missing and was on
    meta becomes whatever its memory held.

    A key is the dotted path of a value in the state dict, as torch saves it.

    Args:
        strict: raise where a key is missing or unexpected and no pattern allows it. Else only where
            nothing fits, and for shapes.
        allow_missing: patterns of keys of the state dict that the checkpoint may lack: their values
            stay. ``*`` stands for any text, dots included.
        allow_unexpected: patterns of keys that only the checkpoint has. A state dict is often a
            part of what was saved, so all are allowed; ``()`` allows none.
        ignore_mismatched: leave a tensor of another shape than the saved one as it is, and a value
            where only one of the two is a tensor.
        flatten_state_dict: as torch's.
        flatten_sharded_tensors: as torch's.

    Attributes:
        loaded: keys that got a value, on any rank; this and the following after the load.
        missing_keys: keys of the state dict of a rank that the checkpoint lacks.
        unexpected_keys: keys of the checkpoint that no rank has.
        mismatched: key -> expected and found shape of what was left as it is.

    Raises:
        MismatchError: something is missing, unexpected or of another shape, and not allowed to be;
            or one of these, and on meta. ``load`` raises it, on every rank, as torch's
            ``CheckpointException``. Nothing is loaded then, and nothing of the state dict changed.

    Example:
        >>> import os, tempfile, torch, torch.distributed.checkpoint as dcp, warnings
        >>> from torchlift.distributed import CheckpointReader, LenientPlanner
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"body": torch.ones(2), "old_head": torch.ones(3)}, path)
        >>> state = {"body": torch.zeros(2), "new_head": torch.zeros(4)}
        >>> planner = LenientPlanner(allow_missing=["new_head"])
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch says that there is no process group
        ...     dcp.load(state, storage_reader=CheckpointReader(path), planner=planner)
        >>> state["body"], planner.missing_keys, planner.unexpected_keys
        (tensor([1., 1.]), ['new_head'], ['old_head'])
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        allow_missing: Patterns = (),
        allow_unexpected: Patterns = ("*",),
        ignore_mismatched: bool = False,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load=True)
        self._options = Options(
            strict=strict,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            ignore_mismatched=ignore_mismatched,
        )
        self.loaded: list[str] = []
        self.missing_keys: list[str] = []
        self.unexpected_keys: list[str] = []
        self.mismatched: Mapping[str, Mismatch] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict, which stays as it is until all ranks know that it can be loaded."""
        self._given = state_dict
        # Where torch finds what is on meta, it puts memory of any content.
        copy = map_leaves(state_dict, lambda leaf, _: leaf)
        super().set_up_planner(copy, metadata, is_coordinator)
        before, after = leaves(state_dict), leaves(copy)
        self._made = {
            path: after[path]
            for path, leaf in before.items()
            if torch.is_tensor(leaf) and leaf.is_meta
        }

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads, with what does not fit beside it."""
        assert self.metadata is not None
        metadata, saved = self.metadata, self.metadata.state_dict_metadata
        # Of names alone: torch finds out which names a checkpoint from before 2.4 has, and would
        # end at the first shape that differs.
        names = dict.fromkeys(saved, BytesStorageMetadata())
        self.metadata = replace(metadata, state_dict_metadata=names)  # type: ignore[arg-type]
        super().create_local_plan()
        self.metadata = metadata
        found, takes = Match(), dict[str, Any]()
        for key, value in self.state_dict.items():
            shape, size = getattr(saved.get(key), "size", None), getattr(value, "size", None)
            own = size() if callable(size) else None
            if key not in saved:
                found.missing.append(key)
            elif shape != own:
                who = "checkpoint" if own is None else "model" if shape is None else None
                note = f"only the {who} has a tensor" if who else None
                found.mismatched[key] = Mismatch(key, tuple(own or ()), tuple(shape or ()), note)
            else:
                takes[key] = value
        found.unexpected = [key for key in saved if key not in self.state_dict]
        unfit = (*found.missing, *found.mismatched)
        made = set(map(id, self._made.values()))
        on_meta = [key for key in unfit if id(self.state_dict[key]) in made]
        plan = create_default_local_load_plan(takes, metadata)
        return replace(plan, planner_data=(found, list(takes), on_meta))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare what does not fit over all ranks, and give each the same lists."""
        assert self.metadata is not None
        founds, takes, metas = zip(*(plan.planner_data for plan in global_plan), strict=True)
        everywhere = set.intersection(*(set(found.unexpected) for found in founds))
        both = Match(
            missing=list(dict.fromkeys(key for found in founds for key in found.missing)),
            # The stages of a pipeline share a checkpoint: unexpected is what none of them has.
            unexpected=[key for key in founds[0].unexpected if key in everywhere],
            mismatched={key: item for found in founds for key, item in found.mismatched.items()},
            fits=len(set(chain(*takes))),
        )
        options = self._options
        if found := suggest_rename(both.missing, both.unexpected):
            both.hint = Hint(found, " torchlift.load takes that.")
        elif not (both.fits or both.mismatched):
            both.hint = f"The checkpoint has {clipped_list(both.unexpected)}."
        if not both.fits:  # whatever may be missing: all names are others
            options = replace(options, allow_missing=())
        path = str(getattr(self.metadata.storage_meta, "checkpoint_id", None) or "the checkpoint")
        check_names(both, path, options)
        if (key := next(chain(*metas), None)) is not None:
            raise MismatchError(
                "it is on meta, and the checkpoint has nothing that fits: no value could stay",
                file=path,
                entry=key,
                missing_keys=both.missing,
                mismatched={k: (item.expected, item.found) for k, item in both.mismatched.items()},
                hint="Give it one before the load, as torchlift.materialize(model) does.",
            )
        told = both, list(dict.fromkeys(key for keys in takes for key in keys))
        return [
            replace(plan, planner_data=told) for plan in super().create_global_plan(global_plan)
        ]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Keep the lists, of which all ranks have the same, and load into what was given."""
        for (*way, last), tensor in self._made.items():
            container: Any = reduce(getitem, way, self._given)
            if not isinstance(container, tuple):  # to torch, an object: it is loaded as a whole
                container[last] = tensor
        if self.state_dict is self.original_state_dict:
            self.state_dict = self._given
        self.original_state_dict = self._given
        found, self.loaded = new_plan.planner_data
        self.missing_keys, self.unexpected_keys = found.missing, found.unexpected
        self.mismatched = found.mismatched
        return super().finish_plan(new_plan)

    def _summary(self) -> tuple[str, Facts]:
        return f"loaded {count_of(len(self.loaded), 'value')}", [
            *list_names("missing", self.missing_keys),
            *list_names("unexpected", self.unexpected_keys),
            *list_names("mismatched", [str(item) for item in self.mismatched.values()]),
        ]
