"""`from_to`: convert the names and layouts of a GGUF file to those of transformers.

llama.cpp's converter (ggml-org/llama.cpp, convert_hf_to_gguf.py) does more than rename. It reorders
the rows of q and k, adds one to norms, joins and transposes. Each step here undoes one of these on
byte ranges of the file. transformers' own ``TENSOR_PROCESSORS`` need complete NumPy arrays, so a
rank could not read only its shard. They also lack Qwen3.5 and the grouped heads of Falcon 40B. The
names come from the table of the ``gguf`` package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from torchlift._plan.names import Made, Rewriting
from torchlift.errors import MismatchError
from torchlift.formats.boxes import unsqueezed
from torchlift.remap.conversion_table import model_of
from torchlift.remap.merging import (
    Unfit,
    add,
    chunked,
    concatenated,
    missing_members,
    reshaped,
    transposed,
)
from torchlift.remap.names import Renaming

# ---- changes of a tensor other than its name


@dataclass(frozen=True)
class _Step:
    """The inverse of an operation of llama.cpp's converter.

    Attributes:
        run: The operation, which gets the tensor and the arguments.
        arguments: Further arguments, made from the configuration.
    """

    run: Callable[..., Made]
    arguments: tuple[object, ...] = ()


def exchange_levels(
    item: Made, sizes: Sequence[int], levels: tuple[int, int], first: int = 0, dim: int = 0
) -> Made:
    """Exchange two levels of rows that are grouped in several levels.

    Args:
        item: The tensor.
        sizes: Sizes of the levels in the file. -1 is the remaining factor.
        levels: The two levels to exchange.
        first: Number of rows in front that keep their place.
        dim: The dimension of the rows.
    """
    if dim:
        upright = exchange_levels(transposed(item, (0, dim)), sizes, levels, first)
        return transposed(upright, (0, dim))
    count, known = item.entry.shape[0] - first, abs(math.prod(sizes))
    if count % known or (count != known and -1 not in sizes):
        raise Unfit(f"the {count} rows of {item.keys[0]!r} do not divide into {known} groups")
    full = [count // known if size == -1 else size for size in sizes]
    if 1 in (full[levels[0]], full[levels[1]]):
        return item
    stay, rows = chunked(item, 0, [first, count])
    rows = reshaped(transposed(_divided(rows, full), levels), rows.entry.shape)
    return concatenated([stay, rows], 0) if first else rows


def group_heads(item: Made, groups: int, heads: int) -> Made:
    """Group the rows of q, k and v by heads. In the file, q, k and v follow each other.

    Args:
        item: The tensor.
        groups: Number of heads of k and v.
        heads: Number of heads of q in each group.
    """
    rows, count = item.entry.shape[0], groups * (heads + 2)
    if rows % count:
        raise Unfit(f"the {rows} rows of {item.keys[0]!r} do not divide into {count} heads")
    sizes = [rows // count * groups * number for number in (heads, 1, 1)]
    grouped = [
        _divided(one, (groups, size // groups))
        for one, size in zip(chunked(item, 0, sizes), sizes, strict=True)
    ]
    return reshaped(concatenated(grouped, 1), item.entry.shape)


def _divided(item: Made, sizes: Sequence[int]) -> Made:
    """Unfold the first dimension into several."""
    return reshaped(item, (*sizes, *item.entry.shape[1:]))


def add_dimension(item: Made, dim: int, dims: int) -> Made:
    """Add a dimension of size 1 that some files leave out, if the tensor has fewer than `dims`."""
    if len(item.entry.shape) >= dims:
        return item
    return Made(unsqueezed(item.entry, dim), item.keys)


#: Dtype -> its name in GGUF.
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def compute(item: Made, name: str) -> Made:
    """Compute the values in float32 while they are copied. See `TensorEntry.encoding`."""
    entry = item.entry
    encoding = entry.encoding
    if entry.is_plain:
        if encoding or entry.dtype not in _TYPES:
            how = ", ".join([entry.dtype, *encoding])
            raise Unfit(f"{item.keys[0]!r} is stored as {how}, which cannot be computed with")
        encoding = (_TYPES[entry.dtype],)
    made = entry._replace(
        dtype="float32", nbytes=4 * entry.numel, storage="", encoding=(*encoding, name)
    )
    return Made(made, item.keys)


# ---- the rule


@dataclass(frozen=True)
class _Line:
    """A tensor of the model and its keys in the file.

    Attributes:
        there: Keys in the file. Several keys are concatenated.
        here: Name in the model.
        steps: Further changes, from the file to the model.
    """

    there: tuple[str, ...]
    here: str
    steps: tuple[_Step, ...] = ()

    def make(self, items: Mapping[str, Made]) -> Made:
        """Make the tensor of the model."""
        if missing := [key for key in self.there if key not in items]:
            raise missing_members(self.here, missing)
        item = items[self.there[0]]
        if len(self.there) > 1:
            item = concatenated([items[key] for key in self.there], -2)
        for step in self.steps:
            item = step.run(item, *step.arguments)
        return item


@dataclass(frozen=True, repr=False)
class _FromGguf(Rewriting, Renaming):
    """The conversion of a GGUF file to one model of transformers.

    Attributes:
        architecture: Name of the model's class.
        lines: Its tensors.
        computed: Pattern of keys that transformers computes itself.
        head: (key of the head, key of the embedding, name of the head), if the embedding is the
            head of a file that does not contain one. Else None.
        facts: (metadata key, text) that a file of this model contains.
    """

    architecture: str
    lines: tuple[_Line, ...]
    computed: str
    head: tuple[str, str, str] | None
    facts: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"from_to('gguf->transformers', {self.architecture})"

    def __call__(self, key: str) -> str | None:
        """Return the name of the first tensor that `key` becomes a part of."""
        found = next((line.here for line in self.lines if key in line.there), key)
        return None if re.fullmatch(self.computed, key) else found

    def check(self, plain: Mapping[str, object], path: str) -> None:
        """Refuse a file whose metadata describes another model. See `Rewriting`."""
        for key, expected in self.facts:
            found = str(plain.get(key, expected))
            # For a list with a number per layer, the metadata shows only its length.
            if found != expected and not found.endswith(" values"):
                raise MismatchError(
                    "the file and the configuration describe different models",
                    file=path,
                    entry=key,
                    expected=f"{expected} for {self.architecture}",
                    found=found,
                    hint="Pass from_to the configuration that belongs to this file.",
                )

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name -> tensor. See `Rewriting`."""
        made: dict[str, Made] = {}
        for line in self.lines:
            if any(key in items for key in line.there):
                try:
                    add(made, line.here, line.make(items), path)
                except Unfit as error:
                    raise MismatchError(
                        f"the tensor does not match the configuration: {error}",
                        entry=line.there[0],
                    ) from None
        known = {key for line in self.lines for key in line.there}
        for key, item in items.items():
            if key not in known and not re.fullmatch(self.computed, key):
                add(made, key, item, path)
        if self.head is not None:
            head, embedding, name = self.head
            if head not in items and embedding in items:
                # A copy of the entry: a plan takes the same entry for a tie.
                item = items[embedding]
                add(made, name, item._replace(entry=item.entry._replace()), path)
        return made


# ---- GGUF


_Steps = tuple[tuple[str, Callable[[Any], _Step]], ...]


def _heads(config: Any, name: str = "num_attention_heads") -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{name} is missing from the {type(config).__name__}")
    return found


def _falcon(config: Any) -> _Step:
    if not (config.new_decoder_architecture or config.multi_query):
        raise ValueError("falcon without multi_query: llama.cpp does not support it")
    groups = _heads(config, "num_kv_heads") if config.new_decoder_architecture else 1
    return _Step(group_heads, (groups, _heads(config) // groups))


#: Rows of q and k. llama.cpp puts the two numbers of a rotation next to each other.
_ROTATED: _Steps = (
    (r"\.attn_q\.", lambda c: _Step(exchange_levels, ((_heads(c), -1, 2), (1, 2)))),
    (
        r"\.attn_k\.",
        lambda c: _Step(exchange_levels, ((_heads(c, "num_key_value_heads"), -1, 2), (1, 2))),
    ),
)
_NORMS: _Steps = ((r"norm\.weight$", lambda _: _Step(compute, ("minus one",))),)
_MAMBA: _Steps = (
    (r"\.ssm_conv1d\.weight$", lambda _: _Step(add_dimension, (1, 3))),
    (r"\.ssm_a$", lambda _: _Step(compute, ("log of negative",))),
)
_CONV1D = r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$"
_SHARED_GATE: _Steps = ((r"\.ffn_gate_inp_shexp\.", lambda _: _Step(add_dimension, (0, 2))),)


def _of_value_heads(config: Any, *sizes: int, dim: int = 0, behind_qk: bool = False) -> _Step:
    """Return the step for heads of v. llama.cpp orders them by their number in the group."""
    groups = _heads(config, "linear_num_key_heads")
    heads = _heads(config, "linear_num_value_heads") // groups
    first = 2 * groups * config.linear_key_head_dim if behind_qk else 0
    return _Step(exchange_levels, ((heads, groups, *sizes), (0, 1), first, dim))


_LINEAR: _Steps = (
    (r"(?<!ssm)_norm\.weight$", lambda _: _Step(compute, ("minus one",))),
    (r"\.(ssm_a|ssm_dt\.bias|ssm_alpha\.weight|ssm_beta\.weight)$", _of_value_heads),
    (r"\.attn_gate\.weight$", lambda c: _of_value_heads(c, -1)),
    (r"\.(attn_qkv|ssm_conv1d)\.weight$", lambda c: _of_value_heads(c, -1, behind_qk=True)),
    (r"\.ssm_out\.weight$", lambda c: _of_value_heads(c, -1, dim=1)),
    *_MAMBA,
)
#: model_type of transformers -> (architecture of GGUF, steps by pattern of keys). The tests compare
#: each with the values that transformers reads.
_GGUF: dict[str, tuple[str, _Steps]] = {
    "bloom": (
        "bloom",
        ((r"\.attn_qkv\.", lambda c: _Step(exchange_levels, ((3, _heads(c), -1), (0, 1)))),),
    ),
    "falcon": ("falcon", ((r"\.attn_qkv\.", _falcon),)),
    "gemma2": ("gemma2", _NORMS),
    "gemma3_text": ("gemma3", _NORMS),
    "gpt2": ("gpt2", ((_CONV1D, lambda _: _Step(transposed, ((0, 1),))),)),
    "lfm2": ("lfm2", ((r"\.shortconv\.conv\.weight$", lambda _: _Step(add_dimension, (1, 3))),)),
    "llama": ("llama", _ROTATED),
    "mamba": ("mamba", _MAMBA),
    "minimax_m2": ("minimax-m2", ()),
    "mistral": ("llama", _ROTATED),
    "nemotron": ("nemotron", _NORMS),
    "phi3": ("phi3", ()),
    "qwen2": ("qwen2", ()),
    "qwen2_moe": ("qwen2moe", _SHARED_GATE),
    "qwen3": ("qwen3", ()),
    "qwen3_5_moe_text": ("qwen35moe", (*_LINEAR, *_SHARED_GATE)),
    "qwen3_5_text": ("qwen35", _LINEAR),
    "qwen3_moe": ("qwen3moe", ()),
    "stablelm": ("stablelm", ()),
    "starcoder2": ("starcoder2", ()),
    "t5": ("t5", ()),
    "umt5": ("t5", ()),
}
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"
#: Tensors that transformers computes: rope factors, and buffers that older versions saved.
_COMPUTED = (
    r"(.*\.)?rope_(freqs|factors_long|factors_short)\.weight"
    r"|(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)"
)


def _gguf(model: nn.Module) -> Renaming:
    config: Any = model.config
    kind = config.model_type
    if kind not in _GGUF:
        raise ValueError(
            f"from_to does not support GGUF files of {kind!r}. Supported: "
            f"{', '.join(sorted(_GGUF))}"
        )
    architecture, rules = _GGUF[kind]
    steps = [(re.compile(pattern), make(config)) for pattern, make in rules]
    keys: dict[str, list[str]] = {}
    for key, name in _names(model, architecture).items():
        keys.setdefault(name, []).append(key)
    lines = []
    for name, there in keys.items():
        taken = tuple(step for pattern, step in steps if pattern.search(there[0]))
        lines.append(_Line(tuple(there), name, taken))
        if len(there) > 1:  # newer files may contain them as one tensor
            lines.append(_Line((there[0].replace("_gate_", "_gate_up_"),), name, taken))
    parameters = {name: id(one) for name, one in model.named_parameters(remove_duplicate=False)}
    names = {line.there[0]: line.here for line in lines}
    head = names.get(_OUTPUT)
    is_shared = head is None or parameters[head] == parameters.get(str(names.get(_EMBEDDING)))
    facts = {"general.architecture": architecture}
    for key, name in (
        ("head_count", "num_attention_heads"),
        ("head_count_kv", "num_key_value_heads"),
    ):
        if isinstance(value := getattr(config, name, None), int):
            facts[f"{architecture}.attention.{key}"] = str(value)
    without = _COMPUTED
    if architecture.startswith("qwen35"):
        # The layers after these predict further tokens. transformers does not have them.
        without += rf"|blk\.{config.num_hidden_layers}\..*"
    return _FromGguf(
        architecture=type(model).__name__,
        lines=tuple(lines),
        computed=without,
        head=None if is_shared or head is None else (_OUTPUT, _EMBEDDING, head),
        facts=tuple(facts.items()),
    )


def _names(model: nn.Module, architecture: str) -> dict[str, str]:
    """Return key in GGUF files -> name in the model, by the map of transformers."""
    library: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    config: Any = model.config
    # The processor of Qwen2-MoE also names the experts of the other models.
    kinds = library.TENSOR_PROCESSORS
    processor = kinds.get(architecture, kinds["qwen2moe"])({})
    count = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", None) or 0)
    # The map needs a base model inside another model. Without the prefix, MambaModel gets the norm
    # of layer 0 for `output_norm`.
    prefix = str(getattr(model, "base_model_prefix", ""))
    whole = model if hasattr(model, prefix) else nn.Module()
    if whole is not model:
        whole.add_module(prefix or "model", model)
    try:
        names = library.get_gguf_hf_weights_map(whole, processor, architecture, count)
    except ImportError as error:
        raise ImportError("from_to needs the gguf package: pip install gguf") from error
    found: dict[str, str] = {}
    for key, name in names.items():
        if whole is not model:
            name = name.partition(".")[2]
        # The map leaves out the suffix of experts, and has fused ones for Qwen3.5.
        key += ".weight" * key.endswith("_exps")
        found |= {key.replace("_gate_up_exps", f"_{one}_exps"): name for one in ("gate", "up")}
    for name in model.state_dict():
        if layer := re.search(r"\.(\d+)\.linear_attn\.dt_bias$", name):  # missing from the map
            found[f"blk.{layer[1]}.ssm_dt.bias"] = name
    return found


def from_to(kind: str, model_or_config: Any) -> Renaming:
    """Make a rename from the tensors of a GGUF file to those of a model of transformers.

    Supported models: ``bloom``, ``falcon``, ``gemma2``, ``gemma3_text``, ``gpt2``,
    ``lfm2``, ``llama``, ``mamba``, ``minimax_m2``, ``mistral``, ``nemotron``, ``phi3``, ``qwen2``,
    ``qwen2_moe``, ``qwen3``, ``qwen3_5_moe_text``, ``qwen3_5_text``, ``qwen3_moe``, ``stablelm``,
    ``starcoder2``, ``t5``, ``umt5``.

    llama.cpp changes more than names. It reorders the rows of q and k of LLaMA, adds one to the
    norms of Gemma, and joins or splits experts and q, k and v. This rename undoes all of it on the
    bytes of the file. On a mesh, each rank reads only its shards. Quantised blocks are dequantised
    as they are copied. A uint8 parameter with rows of the same number of bytes keeps the blocks.

    Args:
        kind: ``"gguf->transformers"``.
        model_or_config: A model of transformers, live or a skeleton. Or its configuration, which
            must name its class (``architectures``).

    Returns:
        A rename. It drops tensors that transformers computes (``rope_freqs``). If the file does not
        contain a head (``output.weight``), the embedding is used as the head.

    Raises:
        ValueError: If the kind or the architecture is not supported.
        ValueError: If a number is missing from the configuration.
        TypeError: If it is neither a model of transformers nor a configuration that names one.
        ImportError: If transformers or the ``gguf`` package is not installed.

    Example:
        >>> import torchlift, transformers
        >>> from torchlift import remap
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=1, vocab_size=16)
        >>> model = torchlift.skeleton(transformers.LlamaForCausalLM, config)
        >>> rename = remap.from_to("gguf->transformers", model)
        >>> rename("blk.0.attn_q.weight")
        'model.layers.0.self_attn.q_proj.weight'
    """
    if kind != "gguf->transformers":
        raise ValueError(
            f"from_to({kind!r}): expected 'gguf->transformers'. Use remap.rules for other names. "
            "llama.cpp's convert_hf_to_gguf.py writes GGUF files"
        )
    return _gguf(model_of("from_to", model_or_config))
