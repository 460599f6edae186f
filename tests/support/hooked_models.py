"""Models whose own code takes part in a load, and may refuse it when everything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Raises(nn.Linear):
    """Loads itself: the weight first, and then it stops."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[prefix + "weight"])
            self.weight.data.add_(1)
        raise ValueError("half-way")


class Keeps(nn.Linear):
    """Extra state that is refused when it arrives, after it was taken."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen = [1]

    def get_extra_state(self) -> object:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen[:] = state
        if state == ["bad"]:
            raise ValueError("not this state")


def renames(model: nn.Module, old: str = "first.", new: str = "0.") -> None:
    """A pre-hook that renames keys, counts its calls and registers a buffer."""

    def rename(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.calls = getattr(module, "calls", 0) + 1
        if not hasattr(module, "table"):
            module.register_buffer("table", torch.ones(2), persistent=False)
        for key in [key for key in state if key.startswith(prefix + old)]:
            state[prefix + new + key[len(prefix + old) :]] = state.pop(key)

    model.register_load_state_dict_pre_hook(rename)


def refuses(model: nn.Module) -> None:
    """A post-hook that looks at what was loaded, writes to it, and does not like it."""

    def refuse(module: Any, keys: Any) -> None:
        with torch.no_grad():
            next(module.parameters()).mul_(3)
        raise ValueError("no")

    model.register_load_state_dict_post_hook(refuse)


def reports(model: nn.Module) -> None:
    """A post-hook that finds a key missing."""
    model.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.append("odd"))


def layers(kind: type[nn.Module] = nn.Linear, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), kind(4, 2))


def changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    """Return what makes a model with a hook."""

    def make() -> nn.Module:
        change(model := layers())
        return model

    return make


#: What refuses -> a model with that trouble, and what its error says. The state dict has names that
#: only the pre-hook knows where there is one.
TROUBLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a_strict_mismatch_after_a_pre_hook": (
        changed(lambda m: renames(m, "2.", "nobody.")), "'nobody.weight'"),
    "a_shape_behind_a_pre_hook": (
        changed(lambda m: renames(m, "2.weight", "0.weight")), "size mismatch"),
    "an_override_that_raises_half_way": (lambda: layers(Raises), "half-way"),
    "a_post_hook_that_raises": (changed(refuses), "no"),
    "a_post_hook_that_reports": (changed(reports), "odd"),
    "extra_state_that_is_refused": (lambda: layers(Keeps), "not this state"),
}  # fmt: skip


#: What cannot be copied into a tensor -> what becomes of a good value.
BAD_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda value: value.to("meta"),
    "sparse": lambda value: value.to_sparse(),
    "quantised": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    "nested": lambda value: torch.nested.nested_tensor([value]),
    "shape": lambda value: torch.zeros(value.shape[0] + 1, *value.shape[1:]),
    "text": lambda value: "a text",
}


def state_for(model: nn.Module, seed: int = 5) -> dict[str, Any]:
    """A state dict of another training, with what the model's code does not like."""
    torch.manual_seed(seed)
    state: dict[str, Any] = {
        key: torch.rand(value.shape).to(value.dtype) if isinstance(value, torch.Tensor) else ["bad"]
        for key, value in layers(type(model[2])).state_dict().items()  # type: ignore[index]
    }
    return state


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    """Everything that the modules know, besides their children."""
    return [
        {name: value for name, value in vars(module).items() if name != "_modules"}
        | {"parameters": dict(module._parameters), "buffers": dict(module._buffers)}
        | {"seen": list(getattr(module, "seen", ()))}
        for module in model.modules()
    ]
