"""`transformers`: that library's own conversion table as a rename.

Its rules for names are run as they are; what they do to tensors is done here to entries, of which
nothing has been read. For a loop over keys that is easy to follow there, see
``transformers.core_model_loading.convert_and_load_state_dict_in_model``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from torchlift._plan import Made, Rewriting
from torchlift.errors import CheckpointError, MismatchError, PlacementError
from torchlift.remap.merging import (
    MOST_NAMED,
    Unfit,
    add,
    chunked,
    concatenated,
    missing_members,
    stacked,
    taken,
    transposed,
    unstacked,
)
from torchlift.remap.names import Renaming

#: What is in conversion: pattern of the table, or a name made of it -> tensors.
_Tensors = dict[str, list[Made]]


#: What Python takes for no number from 4300 digits on, and nobody for that of a list's member.
_LONG = re.compile("[0-9]{10,}")


@dataclass(frozen=True)
class _Group:
    """The tensors that one converter of the table takes together.

    Attributes:
        converter: of the table.
        name: of the first target, by which they belong together.
        tensors: pattern that a key fits -> tensors, in the order of numbers in their names.
    """

    converter: Any
    name: str
    tensors: _Tensors

    @property
    def absent(self) -> list[str]:
        """Return the patterns that no key fits."""
        return [source for source in self.converter.source_patterns if source not in self.tensors]


@dataclass(frozen=True, repr=False)
class _Table(Rewriting, Renaming):
    """The conversions that transformers makes while it loads a model.

    Attributes:
        architecture: the class of the model.
        config: its configuration, which says how many heads and the like there are.
        prefix: what the model calls its base model.
        shapes: name in the model -> shape.
        rules: those of the table.
        reversible: those of them that it also applies when it saves, reversed.
        saves: whether this is the way back.
    """

    architecture: str
    config: Any
    prefix: str
    shapes: dict[str, tuple[int, ...]]
    rules: Sequence[Any]
    reversible: Sequence[Any]
    saves: bool = False

    def __repr__(self) -> str:
        return f"transformers({self.architecture}){'.reversed()' if self.saves else ''}"

    def __call__(self, key: str) -> str:
        """Return the name of the first tensor that values of `key` go to."""
        renamings, converters = self._rules()
        return self._name(key, renamings, converters)[0]

    def reversed(self) -> _Table:
        """Return the rule from the model to what ``save_pretrained`` writes."""
        made = replace(self, saves=not self.saves)
        try:
            made._rules()
        except NotImplementedError as error:
            raise ValueError(f"{self!r} has no way back: an operation of it has none") from error
        return made

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor; see `Rewriting`."""
        try:
            return self._rewritten(items, path)
        except CheckpointError as error:
            error.file = error.file or path
            raise

    def _rules(self) -> tuple[list[Any], list[Any]]:
        """Return rules for names and for tensors; copies, because they note what they have seen."""
        from transformers.core_model_loading import WeightConverter

        if self.saves:
            rules = [rule.reverse_transform() for rule in self.reversible[::-1]]
        else:
            rules = deepcopy(list(self.rules))
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters

    def _name(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, Any]:
        """Return the name of a key, and the pattern of the converter that takes it, or None."""
        from transformers.core_model_loading import (
            apply_converters,
            apply_renamings,
            rename_source_key,
        )

        if self.saves:
            name, pattern = apply_converters(key, converters)
            return (apply_renamings(key, renamings) if pattern is None else name), pattern
        name, pattern = rename_source_key(key, renamings, converters, self.prefix, self.shapes)
        if name not in self.shapes and key in self.shapes:
            return rename_source_key(key, [], [], self.prefix, self.shapes)
        # What the model lacks is not converted: it is unexpected under the name that it has.
        return (key, None) if pattern is not None and name not in self.shapes else (name, pattern)

    def _rewritten(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        from transformers.core_model_loading import apply_renamings, dot_natural_key

        renamings, converters = self._rules()
        owner = {source: rule for rule in converters for source in rule.source_patterns}
        found: dict[str, _Group | Made] = {}
        # In this order the table counts the members of a list, and decides groups of names.
        for key in sorted(items, key=lambda key: dot_natural_key(_LONG.sub("9" * 9, key))):
            name, pattern = self._name(key, renamings, converters)
            if pattern is None:
                add(found, name, items[key], path)
                continue
            group = found.setdefault(name, _Group(owner[pattern], name, {}))
            if not isinstance(group, _Group):
                add(found, name, items[key], path)
            else:
                group.tensors.setdefault(pattern, []).append(items[key])
        made: dict[str, Made] = {}
        for name, item in found.items():
            if not isinstance(item, _Group):
                add(made, name, item, path)
                continue
            for target, tensor in self._converted(item).items():
                target = apply_renamings(target, renamings) if self.saves else target
                add(made, target, tensor, path)
        return made

    def _converted(self, group: _Group) -> dict[str, Made]:
        """Return name -> tensor of what a converter makes of a group."""
        _require_members(group)
        tensors, rule = group.tensors, group.converter
        try:
            for operation in rule.operations:
                convert = _OPERATIONS.get(type(operation).__name__)
                if convert is None:
                    raise PlacementError(
                        f"transformers converts it by {type(operation).__name__}, which torchlift "
                        "does not have",
                        entry=group.name,
                        hint="Load it with from_pretrained, and save the state dict of the model.",
                    )
                tensors = convert(self, operation, group, tensors)
        except Unfit as error:
            raise MismatchError(
                f"it cannot be converted as transformers does it: {error}", entry=group.name
            ) from None
        # As there: what the operations name is the middle of the full name.
        full = group.name.replace("*.", "0.")
        around = next((full.partition(name) for name in tensors if name in full), None)
        before, after = (around[0], around[2]) if around else ("", "")
        made = {before + name + after: one for name, (one, *_) in tensors.items()}
        for name, item in made.items() if group.absent and not self.saves else ():
            if self.shapes.get(name) != item.entry.shape:
                raise missing_members(name, group.absent)
        return made


def _require_members(group: _Group) -> None:
    """Refuse a list of tensors in which one is missing: the table would take the others for it."""
    numbers: dict[str, dict[int, str]] = {}
    for pattern, items in group.tensors.items():
        keys = [item.keys[0] for item in items]
        rows = [key.split(".") for key in keys]
        if len(keys) < 2 or len({len(row) for row in rows}) > 1:
            continue
        differing = [at for at, column in enumerate(zip(*rows, strict=True)) if len({*column}) > 1]
        if len(differing) != 1:
            continue
        texts = [row[differing[0]] for row in rows]
        stems = [text.rstrip("0123456789") for text in texts]
        if len(set(stems)) > 1 or stems[0] in texts:
            continue
        head, tail = (".".join(rows[0][edge]) for edge in _around(differing[0]))
        head, tail = f"{head}.{stems[0]}".removeprefix("."), f".{tail}" if tail else ""
        # Of a longer number, the first digits: all members before it are missing in any case.
        digits = [text.removeprefix(stems[0])[:10] for text in texts]
        numbers[pattern] = {int(text): f"{head}\0{tail}" for text in digits}
    count = max((1 + max(found) for found in numbers.values()), default=0)
    lacking = (
        form.replace("\0", str(number))
        for found in numbers.values()
        for form in [next(iter(found.values()))]
        for number in range(count)
        if number not in found
    )
    if some := list(islice(lacking, MOST_NAMED)):
        raise missing_members(group.name, some)


def _around(at: int) -> tuple[slice, slice]:
    return slice(0, at), slice(at + 1, None)


# ---- its operations: (table, operation, group, tensors by name) -> tensors by name


def _first(tensors: _Tensors) -> Made:
    if len(tensors) != 1:
        raise Unfit(f"one tensor is expected, not those of {', '.join(tensors)}")
    return next(iter(tensors.values()))[0]


def _chunk(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    item = _first(tensors)
    targets = operation.get_target_patterns(group.converter.target_patterns, config=table.config)
    size = item.entry.shape[operation.dim]
    if size % len(targets):
        raise Unfit(f"{item.keys[0]!r} has {size} rows, which are not {len(targets)} equal slices")
    sizes = [size // len(targets)] * len(targets)
    return _each(targets, chunked(item, operation.dim, sizes))


def _split(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    item, targets = _first(tensors), group.converter.target_patterns
    names = [group.name.replace(targets[0], target) for target in targets]
    if lacking := [name for name in names if name not in table.shapes]:
        raise Unfit(f"the model has no {', '.join(lacking)}")
    sizes = [table.shapes[name][operation.dim] for name in names]
    if sum(sizes) != item.entry.shape[operation.dim]:
        raise Unfit(f"{item.keys[0]!r} of shape {list(item.entry.shape)} is not {sizes}")
    return _each(targets, chunked(item, operation.dim, sizes))


def _concatenate(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    target = operation.get_target_pattern(group.converter.target_patterns)
    items = [one for source in group.converter.source_patterns for one in tensors.get(source, ())]
    if not items:  # the operation before found a single pattern, and took it for all there is
        raise missing_members(group.name, group.absent)
    return {target: [concatenated(items, operation.dim)]}


def _merge_list(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    targets = group.converter.target_patterns
    return {
        operation.get_target_pattern(len(tensors), source, targets): [stacked(items, operation.dim)]
        for source, items in tensors.items()
    }


def _split_list(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    made: _Tensors = {}
    for source, (item, *_) in tensors.items():
        members = unstacked(item, operation.dim)
        targets = group.converter.target_patterns
        names = operation.get_target_patterns(tensors, source, targets, len(members))
        made |= _each(names, members)
    return made


def _transpose(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    item, rule = _first(tensors), group.converter
    target = operation.get_target_pattern(tensors, rule.source_patterns, rule.target_patterns)
    if operation.check_dims and item.entry.shape == table.shapes.get(group.name):
        return {target: [item]}
    return {target: [transposed(item, (operation.dim0, operation.dim1))]}


def _interleave(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    item, dim = _first(tensors), operation.dim
    rows, columns = item.entry.shape[dim] // 2, 2
    if operation.inverse:
        rows, columns = columns, rows
    return {group.converter.target_patterns[0]: [_turned(item, dim, 1, rows, columns)]}


def _permute_for_rope(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    config, rule, made = table.config, group.converter, {}
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    chosen = operation.permute_layer_names
    for source, items in tensors.items():
        target = operation.get_target_pattern(source, rule.source_patterns, rule.target_patterns)
        if chosen is not None and not any(name in source for name in chosen):
            made[target] = items
            continue
        if len(items) > 1:
            raise Unfit(f"one tensor is expected, not {len(items)}")
        half = items[0].entry.shape[0] // heads // 2
        sizes = (2, half) if operation.inverse else (half, 2)
        made[target] = [_turned(items[0], 0, heads, *sizes)]
    return made


def _turned(item: Made, dim: int, blocks: int, rows: int, columns: int) -> Made:
    """Return a tensor in which one dimension is blocks of rows and columns, these exchanged."""
    size = rows * columns
    if item.entry.shape[dim] != blocks * size:
        raise Unfit(f"{item.keys[0]!r} of shape {list(item.entry.shape)} is not {blocks} x {size}")
    slices = [
        taken(item, dim, range(start + column, start + size, columns))
        for start in range(0, blocks * size, size)
        for column in range(columns)
    ]
    return concatenated(slices, dim)


def _fuse_experts(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    targets, sources = group.converter.target_patterns, group.converter.source_patterns
    if group.absent:
        raise missing_members(group.name, group.absent)
    made: defaultdict[str, list[Made]] = defaultdict(list)
    for items in (tensors[source] for source in sources):
        size = math.ceil(len(items) / len(targets))
        for at, target in enumerate(targets):
            some = items[at * size : (at + 1) * size]
            if not some:
                raise Unfit(f"{len(items)} members do not divide into {len(targets)}")
            made[target].append(stacked(some, operation.stack_dim))
    return {name: [concatenated(items, operation.concat_dim)] for name, items in made.items()}


def _divide_experts(table: _Table, operation: Any, group: _Group, tensors: _Tensors) -> _Tensors:
    targets, made = group.converter.target_patterns, _Tensors()
    fused = [tensors[source][0] for source in group.converter.source_patterns if source in tensors]
    slices = []
    for item in fused:
        size = item.entry.shape[operation.concat_dim]
        if size % len(targets):
            raise Unfit(f"{item.keys[0]!r} does not divide into {len(targets)} equal slices")
        slices.append(chunked(item, operation.concat_dim, [size // len(targets)] * len(targets)))
    for at, target in enumerate(targets):
        members = chain.from_iterable(unstacked(row[at], operation.stack_dim) for row in slices)
        made |= {target.replace("*", str(n)): [one] for n, one in enumerate(members)}
    return made


def _each(names: Iterable[str], items: Sequence[Made]) -> _Tensors:
    return {name: [item] for name, item in zip(names, items, strict=True)}


_OPERATIONS: dict[str, Callable[[_Table, Any, _Group, _Tensors], _Tensors]] = {
    "Chunk": _chunk,
    "Split": _split,
    "Concatenate": _concatenate,
    "MergeModulelist": _merge_list,
    "SplitModulelist": _split_list,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_experts,
    "ErnieSplitAndDecoupleTextVisionExperts": _divide_experts,
}


def transformers(model_or_config: Any) -> Renaming:
    """Return the conversions that transformers makes while it loads a model, as a rename.

    Since version 5 its models hold experts in one tensor, and q, k and v apart, where files do not:
    ``from_pretrained`` converts them. This is its own table
    (``transformers.conversion_mapping``), also for older names (``gamma`` and ``beta`` of BERT),
    for what the model lacks or has as a prefix, and for what was registered there. A file that has
    the model's own names is left as it is.

    Args:
        model_or_config: a model of transformers, live or a skeleton; or its configuration, which
            must name its class (``architectures``).

    Returns:
        A rename. Its ``reversed()`` leads to what ``save_pretrained`` writes.

    Raises:
        TypeError: it is no model of transformers and no configuration that names one.
        ImportError: transformers is not installed, or older than its conversion table.

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
    try:
        from transformers import PretrainedConfig, PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError as error:
        raise ImportError(
            "remap.transformers needs transformers 5 or later, which has a conversion table"
        ) from error
    model = model_or_config
    if isinstance(model, PretrainedConfig):
        model = _of_config(model)
    if not isinstance(model, PreTrainedModel):
        found = f"a {type(model_or_config).__name__}"
        raise TypeError(f"expected a model of transformers, or its configuration, not {found}")
    quantizer = getattr(model, "hf_quantizer", None)
    saved = get_model_conversion_mapping(model, hf_quantizer=quantizer, add_legacy=False)
    return _Table(
        architecture=type(model).__name__,
        config=model.config,
        prefix=model.base_model_prefix,
        shapes={name: tuple(tensor.shape) for name, tensor in _tensors(model).items()},
        rules=get_model_conversion_mapping(model, hf_quantizer=quantizer),
        # As there: whether a prefix was in the file is known only once one was loaded.
        reversible=[rule for rule in saved if not isinstance(rule, PrefixChange)],
    )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if hasattr(value, "shape")}


def _of_config(config: Any) -> nn.Module:
    """Make the model of a configuration, without storage."""
    import transformers as library

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
