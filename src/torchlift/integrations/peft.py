"""PEFT's adapters beside their base: `peft_names` to load both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peft import get_peft_model_state_dict
from torch import nn

from torchlift._plan.names import Made, Rewriting
from torchlift._plan.rules import rename_keys

#: What PEFT's wrappers put into the names of a base: of all of it, and of a layer.
_WRAPPER = "base_model.model."
_LAYER = re.compile(r"\.((?:token_adapter\.)?base_layer|original_module)(?=\.)")
#: In the names of modules that an adapter has anew.
_MODULES = ".modules_to_save."


def peft_names(model: nn.Module, adapter_name: str = "default") -> Callable[[str], str]:
    """Return the rename from a base's file, and an adapter's, to a model that PEFT has wrapped.

    For ``torchlift.load(model, [base, adapter], rename=peft_names(model))``, and for the adapter
    alone with ``allow_missing=["*"]``. Of any method of PEFT, whose own function says which names
    are the adapter's. What the adapter has of the base (biases, embeddings) takes the base's place.

    Args:
        model: what ``get_peft_model`` returns, live or a skeleton.
        adapter_name: of which adapter; the weights of others keep their names.

    Returns:
        For ``rename=`` of `torchlift.load`.
    """
    whole = {name: name for name in model.state_dict()}
    # With "auto", PEFT would ask the hub whether the vocabulary was resized.
    own: dict[str, str] = get_peft_model_state_dict(
        model, whole, adapter_name, save_embedding_layers=False
    )
    # Biases that are trained are the adapter's, under the names that the base's have in the model.
    apart = {name for key, name in own.items() if key != name}
    return _Names({_plain(name): name for name in whole.keys() - apart} | own)


@dataclass(frozen=True, repr=False)
class _Names(Rewriting):
    """A rename; a dict alone would be refused where one of its keys is not.

    Attributes:
        names: key of a base or an adapter -> name in the model.
    """

    names: Mapping[str, str]

    def __repr__(self) -> str:
        return "peft_names(...)"

    def __call__(self, key: str) -> str:
        return self.names.get(key, key)

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor: of two, the adapter's; see `Rewriting`."""
        saved: dict[str, str] = {}
        for key in filter(lambda key: key.startswith(_WRAPPER), items):
            # With bias="all", PEFT saves a bias of modules_to_save twice, and loads the other one.
            if _MODULES not in key or self(key) not in saved:
                saved[self(key)] = key
        kept = [key for key in items if saved.get(self(key), key) == key]
        return {name: items[key] for key, name in rename_keys(kept, self, path).items()}


def _plain(name: str) -> str:
    """Return the name of a base's weight before PEFT wrapped it."""
    return _LAYER.sub("", name).removeprefix(_WRAPPER)
