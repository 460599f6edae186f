"""PEFT's adapters beside their base: `peft_names` to load both, `merge_lora` to load their sum."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model_state_dict
from torch import nn
from transformers.pytorch_utils import Conv1D

import torchlift
from torchlift._model import ModuleTree
from torchlift._plan import Made, Rewriting, renamed
from torchlift._sources import checkpoint
from torchlift.errors import MismatchError, NotFound, PlacementError

#: What PEFT's wrappers put into the names of a base: of all of it, and of a layer.
_WRAPPER = "base_model.model."
_LAYER = re.compile(r"\.((?:token_adapter\.)?base_layer|original_module)(?=\.)")
#: In the names of modules that an adapter has anew.
_MODULES = ".modules_to_save."
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
_CONFIG = "adapter_config.json"
_BY_PEFT = "Merge by PEFT's merge_and_unload, and save the state dict of the result."


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
        return {name: items[key] for key, name in renamed(kept, self, path).items()}


def _plain(name: str) -> str:
    """Return the name of a base's weight before PEFT wrapped it."""
    return _LAYER.sub("", name).removeprefix(_WRAPPER)


@dataclass(frozen=True)
class _Weight:
    """What a weight of a base is.

    Attributes:
        names: all of them, in the order of the state dict.
        shape: its sizes.
        turned: whether a Conv1D has it, with the sides of a Linear's exchanged; None: no layer of
            a checkpoint says so.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    turned: bool | None = None


@dataclass(frozen=True)
class _Change:
    """What an adapter does to one weight.

    Attributes:
        factors: the keys of A and B; of a weight that the adapter has anew, its key alone.
        shape: that of the weight.
        scale: of the product of B and A.
        turned: whether the weight has the sides of the product exchanged; None: not known yet.
    """

    factors: tuple[str, ...]
    shape: tuple[int, ...]
    scale: float = 1.0
    turned: bool | None = False


@dataclass(frozen=True, repr=False)
class _Merge:
    """A transform: the weights of a base with the changes of an adapter.

    Attributes:
        adapter: its checkpoint.
        changes: name of a weight -> what becomes of it, in this order.
        known: names of all weights where the changes were looked up.
    """

    adapter: torchlift.Checkpoint
    changes: Mapping[str, list[_Change]]
    known: frozenset[str]

    def __repr__(self) -> str:
        return f"merge_lora({os.fspath(self.adapter.path)!r})"

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum, computed and rounded as PEFT does it.

        Raises:
            MismatchError: names begin otherwise here, so that a change would be left out.
        """
        if name not in self.known:
            same = (k for k in self.changes if name.endswith(f".{k}") or k.endswith(f".{name}"))
            if (other := next(same, None)) is not None:
                raise MismatchError(
                    "the adapter was prepared for weights of other names: it would change nothing",
                    file=os.fspath(self.adapter.path),
                    entry=name,
                    expected=other,
                    hint="Give merge_lora what is loaded into, or the file that is converted.",
                )
        for change in self.changes.get(name, ()):
            tensor = self._changed(tensor, change)
        return tensor

    def _changed(self, tensor: torch.Tensor, change: _Change) -> torch.Tensor:
        first, *second = (self.adapter[key].to(tensor.device) for key in change.factors)
        if not second:
            return first.to(tensor.dtype, copy=True)
        # PEFT trains and merges adapters of half precision in float32.
        a, b = (each.float() if each.itemsize < 4 else each for each in (first, *second))
        product = b.flatten(1) @ a.flatten(1)  # of a convolution too, whose B is 1 wide
        product = (product.T if change.turned else product).view(change.shape)
        return (tensor + product * change.scale).to(tensor.dtype)


def merge_lora(adapter: str | os.PathLike[str], into: Any) -> _Merge:
    """Return a transform that adds a LoRA adapter to its base while that is loaded or converted.

    ``torchlift.load(model, base, transform=merge_lora(adapter, model))`` gives what PEFT's
    ``merge_and_unload`` gives, without a wrapped model: base + B @ A * scale, one weight at a time.
    What the adapter has anew (``modules_to_save``, biases, the base of a head) takes the base's
    place. The values are PEFT's to the bit, but for the embedding of a model in half precision:
    that is rounded once here, and the adapter's factors and their product there, too.

    A model knows more than a file. Its tied names are one tensor, whichever the file has; a file
    says so only where both are one storage. A model's layers say which of them is a Conv1D of
    transformers, with rows for columns. In a checkpoint the shapes do, but for a square weight:
    without a bias it is a Linear's; with one it goes by ``fan_in_fan_out``, which PEFT saves as its
    last layer had it, where all others whose shapes tell agree with that, and is refused where not.
    For a base of both kinds give the model.

    Args:
        adapter: the folder, with ``adapter_config.json``, or the file of the weights in it.
        into: the model, live or a skeleton, or what `torchlift.open` reads or returns
            (``torchlift.open(base, root="model")``): it says which names and shapes the weights
            have where they are added.

    Returns:
        For ``transform=`` of `torchlift.load` and `torchlift.convert`. It ends in a `MismatchError`
        where names there have another beginning than in `into`.

    Raises:
        FormatError: it is no such folder of this machine, and a `FileNotFoundError`, too.
        MismatchError: the adapter has a weight for which `into` has none of that name and shape.
        PlacementError: it is no plain LoRA (DoRA, PiSSA, changed parameters of experts, groups of a
            convolution, one new value for two tied names): only PEFT knows how to merge that. Or
            `into` is a checkpoint that does not show which way round a square weight is.
    """
    plain, path = LoraConfig(), os.fspath(adapter)
    folder = os.path.dirname(os.path.abspath(path)) if os.path.isfile(path) else path
    if not os.path.isfile(os.path.join(folder, _CONFIG)):
        # PEFT would ask the hub, as often as that does not answer.
        raise NotFound(
            f"no adapter: it has no {_CONFIG}",
            file=folder,
            expected=f"a folder of this machine with {_CONFIG} and the adapter's weights",
            hint="Give what PEFT's save_pretrained has written; of the hub, a copy.",
        )
    config = PeftConfig.from_pretrained(folder)
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
            hint=_BY_PEFT,
        )
    weights = _weights(into)
    named = {name: weight for weight in weights for name in weight.names}
    ckpt = torchlift.open(adapter)
    anew, added = dict[str, _Change](), dict[str, _Change]()
    for key, entry in ckpt.entries.items():
        name = _plain(key)
        first = next(filter(name.endswith, _FACTORS), None)
        if first is None:
            if not name.endswith(tuple(_FACTORS.values())):
                anew[name] = _Change((key,), entry.shape)
            continue
        layer, other = name.removesuffix(first), key.removesuffix(first) + _FACTORS[first]
        rank, columns = entry.shape[0], entry.shape[1:]
        rows = ckpt.entries[other].shape if other in ckpt.entries else ()
        if len(rows) > 2 and rows[1] != rank:
            raise PlacementError(
                "a convolution in groups is changed: PEFT merges none",
                file=path,
                entry=layer,
            )
        alphas = (config.alpha_pattern or {}).items()
        alpha = next(
            (value for pattern, value in alphas if re.fullmatch(rf"(.*\.)?({pattern})", layer)),
            config.lora_alpha,
        )
        scale = alpha / (rank**0.5 if config.use_rslora else rank)
        turned = True if first == ".lora_embedding_A" else None
        added[f"{layer}.weight"] = _Change((key, other), (*rows[:1], *columns), scale, turned)
    added = _turned(added, named, bool(config.fan_in_fan_out), path)
    needed = [(name, change.shape) for name, change in (*anew.items(), *added.items())]
    unfit = {n: shape for n, shape in needed if n not in named or named[n].shape != shape}
    if unfit:
        name, shape = next(iter(unfit.items()))
        raise MismatchError(
            "the adapter changes weights that are not there, or have another shape",
            file=path,
            entry=name,
            expected=shape,
            found=named[name].shape if name in named else "no such weight",
            hint="Name the model, or the base, that the adapter was trained on.",
            unexpected_keys=[n for n in unfit if n not in named],
            mismatched={n: (named[n].shape, shape) for n, shape in unfit.items() if n in named},
        )
    changes = dict[str, list[_Change]]()
    for weight in weights:
        new = [name for name in weight.names if name in anew]
        apart = [n for n in new for m in config.modules_to_save or () if f".{m}." in f".{n}"]
        together = config.ensure_weight_tying and len(new) == len(weight.names)
        if apart and len(weight.names) > 1 and not together:
            raise PlacementError(
                "of tied weights it has one anew, which PEFT unties",
                file=path,
                entry=apart[0],
                found=f"{', '.join(weight.names)} are one tensor",
                hint=_BY_PEFT,
            )
        found = [anew[name] for name in new] + [added[n] for n in weight.names if n in added]
        changes |= dict.fromkeys(weight.names, found) if found else {}
    return _Merge(ckpt, changes, frozenset(named))


def _turned(
    added: Mapping[str, _Change], named: Mapping[str, _Weight], last: bool, path: str
) -> dict[str, _Change]:
    """Return the changes, those of a Conv1D and of an embedding with their sides exchanged.

    Args:
        added: with the sides that they have for a Linear.
        named: the weights of the base.
        last: whether the last layer that PEFT changed is a Conv1D, as its configuration says.
        path: of the adapter.

    Raises:
        PlacementError: nothing shows it of a square weight.
    """
    # A bias has as many numbers as there are outputs, and those are the columns of a Conv1D.
    biases = {n: named[b].shape for n in named if (b := f"{n.removesuffix('weight')}bias") in named}
    shown = {named[n].shape[1:] == bias for n, bias in biases.items() if _oblong(named[n].shape)}
    shown |= {
        named[name].shape != change.shape
        for name, change in added.items()
        if change.turned is None and name in named and _oblong(change.shape)
    }
    found = dict[str, _Change]()
    for name, change in added.items():
        shape, weight = change.shape, named.get(name, _Weight((), ()))
        turned = change.turned if weight.turned is None else change.turned or weight.turned
        if turned is None and _oblong(shape):
            turned = weight.shape == shape[::-1]
        elif turned is None and len(shape) == 2 and weight.shape == shape and name in biases:
            if shown != {last}:
                raise PlacementError(
                    "is square, and the checkpoint does not show whether a Linear has it or a "
                    "Conv1D, with rows for columns",
                    file=path,
                    entry=name,
                    found=f"fan_in_fan_out={last}, of the last layer",
                    hint="Give merge_lora the model: torchlift.skeleton makes one in no memory.",
                )
            turned = last
        found[name] = replace(change, turned=bool(turned), shape=shape[::-1] if turned else shape)
    return found


def _oblong(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] != shape[1]


def _weights(into: Any) -> list[_Weight]:
    """Return the weights of a model or of a checkpoint, tied ones once."""
    if isinstance(into, nn.Module):
        return [
            _Weight(
                group.names,
                tuple(group.tensor.shape),
                any(isinstance(slot.module, Conv1D) for slot in group.slots),
            )
            for group in ModuleTree(into).groups
        ]
    tied = dict[object, list[str]]()
    with checkpoint(into, None, whole=True) as ckpt:
        for key, entry in ckpt.entries.items():
            same = entry.storage, entry.chunks, entry.shape, entry.stride
            tied.setdefault(same if entry.chunks else key, []).append(key)
        return [_Weight(tuple(keys), ckpt.entries[keys[0]].shape) for keys in tied.values()]
