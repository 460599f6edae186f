"""`transformers`: the conversion table of Hugging Face transformers as a rename.

The table's rules and operations run unchanged, but on tensors that have not been read. Mapped
tensors would be copied. transformers applies the same table in
``transformers.core_model_loading.convert_and_load_state_dict_in_model``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchlift._plan.names import Made, Rewriting
from torchlift.errors import CheckpointError, MismatchError, PlacementError
from torchlift.remap.merging import MOST_NAMED, add, missing_members
from torchlift.remap.names import Renaming
from torchlift.remap.unread import Computed, Unfit, Unread

#: Longer than the number of any list member. Python refuses to parse more than 4300 digits.
_LONG = re.compile("[0-9]{10,}")
_NUMBER = re.compile("[0-9]+")


@dataclass(frozen=True, repr=False)
class _Table(Rewriting, Renaming):
    """The conversions that transformers applies when it loads a model.

    Attributes:
        architecture: Name of the model's class.
        config: Its configuration.
        prefix: The model's name for its base model.
        ignored: Patterns of checkpoint names that the class declares as not needed.
        shapes: Name in the model -> shape.
        rules: The rules of the table.
    """

    architecture: str
    config: Any
    prefix: str
    ignored: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    rules: Sequence[Any]

    def __repr__(self) -> str:
        return f"transformers({self.architecture})"

    @property
    def hides_names(self) -> bool:
        return True

    def __call__(self, key: str) -> str:
        """Return the name of the first tensor that `key` becomes a part of."""
        renamings, converters = self._rules()
        return self._name(key, renamings, converters)[0]

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor. See `Rewriting`."""
        from transformers.core_model_loading import dot_natural_key

        renamings, converters = self._rules()
        owner = {source: rule for rule in converters for source in rule.source_patterns}
        # The table expects this order: it counts the members of a list and groups names by it.
        keys = sorted(items, key=lambda key: dot_natural_key(_LONG.sub("9" * 9, key)))
        names = {key: self._name(key, renamings, converters) for key in keys}
        others = self._of_others({key: name for key, (name, _) in names.items()})
        made: dict[str, Made] = {}
        groups: dict[str, Any] = {}  # name of the first target -> a converter with its tensors
        for key in keys:
            name, pattern = names[key]
            if pattern is None and key not in others:
                add(made, name, items[key], path)
            elif key not in others:
                converter = groups.setdefault(name, deepcopy(owner[pattern]))
                converter.add_tensor(name, key, pattern, Unread.of(items[key]))
        for name, converter in groups.items():
            for target, tensor in self._convert(name, converter).items():
                add(made, target, tensor, path)
        return made

    def _of_others(self, names: Mapping[str, str]) -> set[str]:
        """Return the keys to drop because the model is only a part of the model in the file.

        These are the keys that its class declares as not needed. If all of its tensors are below
        one prefix of the file, such as the vision tower of a CLIP, the keys outside of it, too.
        """
        found = {key: name for key, name in names.items() if name in self.shapes}
        prefixes = {key.removesuffix(name) for key, name in found.items() if key.endswith(name)}
        prefix = prefixes.pop() if len(prefixes) == 1 else ""
        is_part = prefix.endswith(".") and all(key.startswith(prefix) for key in found)
        return {
            key
            for key, name in names.items()
            if name not in self.shapes
            and (
                (is_part and not key.startswith(prefix))
                or any(re.search(pattern, name) for pattern in self.ignored)
            )
        }

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a meta tensor of the parameter's shape, which operations of the table request."""
        if name not in self.shapes:
            raise Unfit(f"the model does not have a parameter {name}")
        return torch.empty(self.shapes[name], device="meta")

    def _rules(self) -> tuple[list[Any], list[Any]]:
        """Return (renamings, converters). Copies: rules remember keys they have seen."""
        from transformers.core_model_loading import WeightConverter

        rules = deepcopy(list(self.rules))
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters

    def _name(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, Any]:
        """Return the name of a key, and the pattern of its converter or None."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(key, renamings, converters, self.prefix, self.shapes)
        if name not in self.shapes and key in self.shapes:
            return rename_source_key(key, [], [], self.prefix, self.shapes)
        # A tensor that the model does not have is not converted. It keeps its name, as unexpected.
        return (key, None) if pattern is not None and name not in self.shapes else (name, pattern)

    def _convert(self, name: str, converter: Any) -> dict[str, Made]:
        """Convert the tensors that a converter has collected, and return name -> tensor."""
        collected: dict[str, list[Unread]] = dict(converter.collected_tensors)
        for stands in collected.values():
            _require_members(name, [stand.made.keys[0] for stand in stands])
        absent = [pattern for pattern in converter.source_patterns if pattern not in collected]
        try:
            found = converter.convert(name, model=self, config=self.config)
        except CheckpointError:
            raise
        except Computed as error:
            raise PlacementError(
                f"transformers converts it with operations that compute new values ({error}). "
                "torchlift only rearranges the values of a file",
                entry=name,
                hint="Load the model with from_pretrained, and save its state dict.",
            ) from None
        except Exception as error:  # an operation may raise any: ValueError, KeyError, torch's
            if absent:  # it failed because patterns are missing
                raise missing_members(name, absent) from None
            raise MismatchError(
                f"the conversion of transformers failed: {error}", entry=name
            ) from error
        made = {
            target: (tensor[0] if isinstance(tensor, list) else tensor).made
            for target, tensor in found.items()
        }
        if absent and any(self.shapes.get(to) != item.entry.shape for to, item in made.items()):
            raise missing_members(name, absent)
        return made


def _require_members(name: str, keys: Sequence[str]) -> None:
    """Refuse a list with a missing member. The table would shift the others into its place."""
    columns = zip(*(_NUMBER.findall(key) for key in keys), strict=False)
    for at, column in enumerate(columns):
        if len({*column}) < len(keys) or len(keys) == 1:
            continue  # not the number of a member
        if lacking := [number for number in map(str, range(len(keys))) if number not in column]:
            start, end = [found.span() for found in _NUMBER.finditer(keys[0])][at]
            missing = [keys[0][:start] + number + keys[0][end:] for number in lacking]
            raise missing_members(name, missing[:MOST_NAMED])


def transformers(model_or_config: Any) -> Renaming:
    """Make a rename of the conversions that transformers applies when it loads a model.

    In transformers 5, many models store all experts in one tensor, and q, k and v separately. Their
    files do not, so ``from_pretrained`` converts them by ``transformers.conversion_mapping``. This
    rename applies the same table, with its older names (``gamma`` and ``beta`` of BERT), prefixes
    and registered conversions. Keys that already have the model's names are not changed. A model
    that is a part of the file's model, such as ``CLIPVisionModel``, loads its part only.

    Args:
        model_or_config: A model of transformers, live or a skeleton. Or its configuration, which
            must name its class (``architectures``).

    Returns:
        A rename.

    Raises:
        TypeError: If it is neither a model of transformers nor a configuration that names one.
        ImportError: If transformers is not installed, or is older than version 5.

    Example:
        >>> import torch, torchlift, transformers
        >>> from torchlift import remap
        >>> config = transformers.MixtralConfig(
        ...     hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=1, num_local_experts=2, vocab_size=16)
        >>> model = torchlift.skeleton(transformers.MixtralForCausalLM, config)
        >>> rename = remap.transformers(model)
        >>> rename("model.layers.0.block_sparse_moe.experts.1.w2.weight")
        'model.layers.0.mlp.experts.down_proj'
    """
    model: Any = model_of("transformers", model_or_config)
    from transformers.conversion_mapping import get_model_conversion_mapping

    quantizer = getattr(model, "hf_quantizer", None)
    return _Table(
        architecture=type(model).__name__,
        config=model.config,
        prefix=model.base_model_prefix,
        # A set without an order. It also contains the patterns of submodules.
        ignored=tuple(sorted(model._keys_to_ignore_on_load_unexpected or ())),
        shapes={
            name: tuple(value.shape)
            for name, value in model.state_dict().items()
            if hasattr(value, "shape")
        },
        rules=get_model_conversion_mapping(model, hf_quantizer=quantizer),
    )


def model_of(rule: str, model_or_config: Any) -> nn.Module:
    """Return a model of transformers. A configuration gives a model on meta.

    Raises:
        TypeError: If it is neither a model nor a configuration.
        ImportError: If transformers is not installed, or is older than version 5.
    """
    try:
        import transformers as library
        from transformers import conversion_mapping as _  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"remap.{rule} needs transformers 5 or later, which has a conversion table"
        ) from error
    config = model_or_config
    if isinstance(config, library.PreTrainedModel):
        model: nn.Module = config
        return model
    if not isinstance(config, library.PretrainedConfig):
        found = f"a {type(config).__name__}"
        raise TypeError(f"expected a model of transformers, or its configuration, not {found}")
    names = getattr(config, "architectures", None) or []
    kind = getattr(library, names[0], None) if names else None
    if kind is None:
        raise TypeError(
            f"the {type(config).__name__} does not name a class of transformers as its "
            f"architecture ({', '.join(names) or 'none'}): pass the model"
        )
    with torch.device("meta"):
        made: nn.Module = kind(config)
    return made
