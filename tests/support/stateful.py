"""An object with a state, such as a loader that knows its place in the data."""

from __future__ import annotations

from typing import Any


class Stateful:
    """Has a state of any kind, which another one takes as it is."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
