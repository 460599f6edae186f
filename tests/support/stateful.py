"""Objects with a state, such as a loader that knows its place in the data, and a layer with one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Stateful:
    """Has a state of any kind, which another one takes as it is."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Loader:
    """The place in some data, which may refuse another one when it has taken it."""

    def __init__(self, at: int, refuses: bool = False) -> None:
        self.at, self.seen, self.refuses = at, torch.full((3,), float(at)), refuses
        # torch does not copy compressed tensors deeply. A folder of ranks keeps dense ones only.
        self.edges = None if dist.is_initialized() else (torch.eye(3) * at).to_sparse_csr()

    def state_dict(self) -> dict[str, Any]:
        rows = [*range(self.at)]
        return {"at": self.at, "seen": self.seen, "edges": self.edges, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.edges = state["at"], state["edges"]
        self.seen.copy_(state["seen"])
        if self.refuses:
            self.added = True
            raise OSError("no such luck")


class Noted(nn.Linear):
    """A layer with extra state of any kind."""

    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state
