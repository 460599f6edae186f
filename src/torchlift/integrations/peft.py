"""PEFT's adapters beside their base: `peft_names` to load both, `merge_lora` to load their sum."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model_state_dict
from torch import nn

import torchlift
from torchlift.errors import MismatchError, PlacementError

#: What PEFT's wrappers put into the names of a base: of all of it, and of a layer.
_WRAPPER, _LAYER = "base_model.model.", re.compile(r"\.(base_layer|original_module)(?=\.)")
#: The two factors of a layer's change, and those of an embedding's, whose sides are exchanged.
_FACTORS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
#: What of a configuration says which layers there are and how they began, or is used here.
_PLAIN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save"),
    *("peft_type", "peft_version", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "task_type", "use_rslora"),
}
#: Ways to begin that leave the base as it is; the others take something off its weights.
_BEGUN = (True, False, "eva", "gaussian", "orthogonal")


def peft_names(model: nn.Module, adapter_name: str = "default") -> Callable[[str], str]:
    """Return the rename from a base's file, and an adapter's, to a model that PEFT has wrapped.

    For ``torchlift.load(model, [base, adapter], rename=peft_names(model))``, and for the adapter
    alone with ``allow_missing=["*"]``. Of any method of PEFT, whose own function says which names
    are the adapter's.

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
    base = {_plain(name): name for name in whole.keys() - own.values()}
    return partial(_named, base | own)


def _named(names: Mapping[str, str], key: str) -> str:
    """Return the name in the model; a dict alone would be refused where one of its keys is not."""
    return names.get(key, key)


def _plain(name: str) -> str:
    """Return the name of a base's weight before PEFT wrapped it."""
    return _LAYER.sub("", name).removeprefix(_WRAPPER)


@dataclass(frozen=True)
class _Change:
    """What an adapter does to one weight.

    Attributes:
        factors: the keys of A and B; of a weight that the adapter has anew, its key alone.
        scale: of their product.
        transposed: whether the weight has the sides of the product exchanged.
    """

    factors: tuple[str, ...]
    scale: float = 1.0
    transposed: bool = False


@dataclass(frozen=True, repr=False)
class _Merge:
    """A transform: the weights of a base with the changes of an adapter.

    Attributes:
        adapter: its checkpoint.
        changes: name of a weight -> what becomes of it.
    """

    adapter: torchlift.Checkpoint
    changes: Mapping[str, _Change]

    def __repr__(self) -> str:
        return f"merge_lora({os.fspath(self.adapter.path)!r})"

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum, computed and rounded as PEFT does it."""
        change = self.changes.get(name)
        if change is None:
            return tensor
        first, *second = (self.adapter[key].to(tensor.device) for key in change.factors)
        if not second:
            return first.to(tensor.dtype, copy=True)
        # PEFT trains and merges adapters of half precision in float32.
        a, b = (each.float() if each.itemsize < 4 else each for each in (first, *second))
        product = b @ a
        return (tensor + (product.T if change.transposed else product) * change.scale).to(
            tensor.dtype
        )


def merge_lora(adapter: str | os.PathLike[str], into: Any) -> _Merge:
    """Return a transform that adds a LoRA adapter to its base while that is loaded or converted.

    ``torchlift.load(model, base, transform=merge_lora(adapter, model))`` gives what PEFT's
    ``merge_and_unload`` gives, without a wrapped model: base + B @ A * scale, one weight at a time.
    What the adapter has anew (``modules_to_save``, biases) takes the base's place. The values are
    PEFT's to the bit, but for the embedding of a model in half precision: that is rounded once
    here, and the adapter's factors and their product there, too.

    Args:
        adapter: the folder, with ``adapter_config.json``.
        into: the model, live or a skeleton, or what `torchlift.open` reads: it says which names
            and shapes the weights have where they are added.

    Returns:
        For ``transform=`` of `torchlift.load` and `torchlift.convert`.

    Raises:
        MismatchError: the adapter has a weight for which `into` has none of that name and shape.
        PlacementError: it is no plain LoRA (DoRA, PiSSA, changed parameters of experts): only PEFT
            knows how to merge that.
    """
    config = PeftConfig.from_pretrained(os.fspath(adapter))
    plain, path = LoraConfig(), os.fspath(adapter)
    odd = [
        f"{name}={value!r}"
        for name, value in sorted(vars(config).items())
        if name not in _PLAIN and value != getattr(plain, name, None)
    ]
    if not isinstance(config, LoraConfig) or config.init_lora_weights not in _BEGUN or odd:
        begun = f"init_lora_weights={getattr(config, 'init_lora_weights', None)!r}"
        raise PlacementError(
            "only a plain LoRA is added as it is loaded",
            file=path,
            found=f"{config.peft_type}, {', '.join([begun, *odd])}",
            hint="Merge by PEFT's merge_and_unload, and save the state dict of the result.",
        )
    shapes = {name: tuple(value.shape) for name, value in _tensors(into).items()}
    ckpt, changes = torchlift.open(adapter), dict[str, _Change]()
    needed = dict[str, tuple[int, ...]]()
    for key, entry in ckpt.entries.items():
        name, first = key.removeprefix(_WRAPPER), next(filter(key.endswith, _FACTORS), None)
        if first is None:
            if not key.endswith(tuple(_FACTORS.values())):
                changes[name], needed[name] = _Change((key,)), entry.shape
            continue
        layer, other = name.removesuffix(first), key.removesuffix(first) + _FACTORS[first]
        rank, columns = entry.shape[0], entry.shape[1:]
        rows = ckpt.entries[other].shape[:1] if other in ckpt.entries else ()
        transposed = first == ".lora_embedding_A" or config.fan_in_fan_out
        alphas = (config.alpha_pattern or {}).items()
        alpha = next(
            (value for pattern, value in alphas if re.fullmatch(rf"(.*\.)?({pattern})", layer)),
            config.lora_alpha,
        )
        name, sides = f"{layer}.weight", (rows, columns)
        scale = alpha / (rank**0.5 if config.use_rslora else rank)
        changes[name] = _Change((key, other), scale, transposed)
        needed[name] = sum(sides[::-1] if transposed else sides, ())
    unfit = [name for name, shape in needed.items() if shapes.get(name) != shape]
    if unfit:
        raise MismatchError(
            "the adapter changes weights that are not there, or have another shape",
            file=path,
            entry=unfit[0],
            expected=needed[unfit[0]],
            found=shapes.get(unfit[0], "no such weight"),
            hint="Name the model, or the base, that the adapter was trained on.",
            unexpected_keys=[name for name in unfit if name not in shapes],
            mismatched={n: (shapes[n], needed[n]) for n in unfit if n in shapes},
        )
    return _Merge(ckpt, changes)


def _tensors(into: Any) -> Mapping[str, Any]:
    """Return name -> what has a shape."""
    if isinstance(into, nn.Module):
        return {k: v for k, v in into.state_dict().items() if hasattr(v, "shape")}
    with torchlift.open(into) as ckpt:
        return dict(ckpt.entries)
