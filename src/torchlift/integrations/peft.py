"""Load PEFT adapters together with their base model: `peft_names`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peft import get_peft_model_state_dict
from torch import nn

from torchlift._plan.names import Made, Rewriting
from torchlift._plan.rules import rename_keys

#: The parts that PEFT's wrappers add to the names of a base model, and of a layer.
_WRAPPER = "base_model.model."
_LAYER = re.compile(r"\.((?:token_adapter\.)?base_layer|original_module)(?=\.)")
#: The part in the names of modules that an adapter replaces.
_MODULES = ".modules_to_save."


def peft_names(model: nn.Module, adapter_name: str = "default") -> Callable[[str], str]:
    """Return the rename from the files of a base and an adapter to a PEFT model.

    Pass it to ``torchlift.load(model, [base, adapter], rename=peft_names(model))``. To load the
    adapter alone, add ``allow_missing=["*"]``. It works with every PEFT method. Biases and
    embeddings in the adapter replace those of the base.

    Args:
        model: The result of ``get_peft_model``, live or a skeleton.
        adapter_name: The adapter. The weights of other adapters keep their names.

    Returns:
        A rule for ``rename=`` of `torchlift.load`.
    """
    whole = {name: name for name in model.state_dict()}
    # With "auto", PEFT would send a request to the hub, to see if the vocabulary was resized.
    own: dict[str, str] = get_peft_model_state_dict(
        model, whole, adapter_name, save_embedding_layers=False
    )
    # Trained biases are the adapter's, but have the names of the base's biases in the model.
    adapted = {name for key, name in own.items() if key != name}
    return _Names({_plain(name): name for name in whole.keys() - adapted} | own)


@dataclass(frozen=True, repr=False)
class _Names(Rewriting):
    """A rename. A dict would be refused if one of its keys is not in the checkpoint.

    Attributes:
        names: Key of a base or an adapter -> name in the model.
    """

    names: Mapping[str, str]

    def __repr__(self) -> str:
        return "peft_names(...)"

    def __call__(self, key: str) -> str:
        return self.names.get(key, key)

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor. The adapter's tensor wins. See `Rewriting`."""
        saved: dict[str, str] = {}
        for key in filter(lambda key: key.startswith(_WRAPPER), items):
            # With bias="all", PEFT saves a bias of modules_to_save twice, and ignores this one.
            if _MODULES not in key or self(key) not in saved:
                saved[self(key)] = key
        kept = [key for key in items if saved.get(self(key), key) == key]
        return {name: items[key] for key, name in rename_keys(kept, self, path).items()}


def _plain(name: str) -> str:
    """Return the name of a base's weight before PEFT wrapped it."""
    return _LAYER.sub("", name).removeprefix(_WRAPPER)
