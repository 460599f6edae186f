"""`from_to`: convert the names and layouts of a GGUF file to those of transformers.

llama.cpp's converter (ggml-org/llama.cpp, convert_hf_to_gguf.py) does more than rename. It reorders
the rows of q and k, adds one to norms, joins and transposes. Each step here undoes one of these on
byte ranges of the file. transformers' own ``TENSOR_PROCESSORS`` need complete NumPy arrays, so a
rank could not read only its shard. They also lack Qwen3.5 and the grouped heads of Falcon 40B. The
names come from the table of the ``gguf`` package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from torchlift._plan.names import Made, Rewriting
from torchlift.errors import MismatchError
from torchlift.remap.conversion_table import model_of
from torchlift.remap.merging import add, missing_members
from torchlift.remap.names import Renaming
from torchlift.remap.unread import MISFITS, Unfit, Unread, made_of

# ---- changes of a tensor other than its name: the inverses of those of llama.cpp's converter


def _exchange(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    levels: tuple[int, int],
    first: int = 0,
    dim: int = 0,
) -> torch.Tensor:
    """Exchange two levels of rows that are grouped in several levels.

    Args:
        tensor: The tensor.
        sizes: Sizes of the levels in the file. -1 is the remaining factor.
        levels: The two levels to exchange.
        first: Number of rows in front that keep their place.
        dim: The dimension of the rows.
    """
    stay, rows = torch.split(tensor, [first, tensor.size(dim) - first], dim)
    grouped = rows.reshape(*rows.shape[:dim], *sizes, *rows.shape[dim + 1 :])
    one, two = (dim + level for level in levels)
    if 1 in (grouped.size(one), grouped.size(two)):
        return tensor
    rows = grouped.transpose(one, two).reshape(rows.shape)
    return torch.cat([stay, rows], dim) if first else rows


def _exchange_value_heads(
    tensor: torch.Tensor, config: Any, *sizes: int, dim: int = 0, behind_qk: bool = False
) -> torch.Tensor:
    """Order heads of v by their group. llama.cpp orders them by their number in the group."""
    groups = _number(config, "linear_num_key_heads")
    heads = _number(config, "linear_num_value_heads") // groups
    first = 2 * groups * config.linear_key_head_dim if behind_qk else 0
    return _exchange(tensor, (heads, groups, *sizes), (0, 1), first, dim)


def _group_heads(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Group the rows of Falcon's q, k and v by heads. In the file, q, k and v follow each other."""
    if not (config.new_decoder_architecture or config.multi_query):
        raise ValueError("falcon without multi_query: llama.cpp does not support it")
    groups = _number(config, "num_kv_heads") if config.new_decoder_architecture else 1
    heads = _number(config) // groups
    unit = tensor.size(0) // (heads + 2)
    parts = torch.split(tensor, [heads * unit, unit, unit])
    grouped = [part.reshape(groups, -1, *tensor.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).reshape(tensor.shape)


def _add_dimension(tensor: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """Add a dimension of size 1 that some files leave out, if the tensor has fewer than `dims`."""
    return tensor if tensor.dim() >= dims else tensor.unsqueeze(dim)


#: Dtype -> its name in GGUF.
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _compute(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Compute the values in float32 while they are copied. See `TensorEntry.encoding`."""
    entry, keys = made_of(tensor)
    encoding = entry.encoding
    if entry.is_plain:
        if encoding or entry.dtype not in _TYPES:
            how = ", ".join([entry.dtype, *encoding])
            raise Unfit(f"{keys[0]!r} is stored as {how}, which cannot be computed with")
        encoding = (_TYPES[entry.dtype],)
    made = entry._replace(
        dtype="float32", nbytes=4 * entry.numel, storage="", encoding=(*encoding, name)
    )
    return Unread.of(Made(made, keys))


def _number(config: Any, name: str = "num_attention_heads") -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{name} is missing from the {type(config).__name__}")
    return found


#: Pattern of keys in the file -> the change of such a tensor, which gets it and the configuration.
_Steps = dict[str, Callable[[torch.Tensor, Any], torch.Tensor]]

#: Rows of q and k. llama.cpp puts the two numbers of a rotation next to each other.
_ROTATED: _Steps = {
    r"\.attn_q\.": lambda t, c: _exchange(t, (_number(c), -1, 2), (1, 2)),
    r"\.attn_k\.": lambda t, c: _exchange(t, (_number(c, "num_key_value_heads"), -1, 2), (1, 2)),
}
_NORMS: _Steps = {r"norm\.weight$": lambda t, _: _compute(t, "minus one")}
_MAMBA: _Steps = {
    r"\.ssm_conv1d\.weight$": lambda t, _: _add_dimension(t, 1, 3),
    r"\.ssm_a$": lambda t, _: _compute(t, "log of negative"),
}
_SHARED_GATE: _Steps = {r"\.ffn_gate_inp_shexp\.": lambda t, _: _add_dimension(t, 0, 2)}
_LINEAR: _Steps = {
    r"(?<!ssm)_norm\.weight$": lambda t, _: _compute(t, "minus one"),
    r"\.(ssm_a|ssm_dt\.bias|ssm_alpha\.weight|ssm_beta\.weight)$": _exchange_value_heads,
    r"\.attn_gate\.weight$": lambda t, c: _exchange_value_heads(t, c, -1),
    r"\.(attn_qkv|ssm_conv1d)\.weight$": (
        lambda t, c: _exchange_value_heads(t, c, -1, behind_qk=True)
    ),
    r"\.ssm_out\.weight$": lambda t, c: _exchange_value_heads(t, c, -1, dim=1),
    **_MAMBA,
}
_CONV1D = r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$"
#: model_type of transformers -> (architecture of GGUF, changes). The tests compare each with the
#: values that transformers reads.
_GGUF: dict[str, tuple[str, _Steps]] = {
    "bloom": (
        "bloom", {r"\.attn_qkv\.": lambda t, c: _exchange(t, (3, _number(c), -1), (0, 1))},
    ),
    "falcon": ("falcon", {r"\.attn_qkv\.": _group_heads}),
    "gemma2": ("gemma2", _NORMS),
    "gemma3_text": ("gemma3", _NORMS),
    "gpt2": ("gpt2", {_CONV1D: lambda t, _: t.transpose(0, 1)}),
    "lfm2": ("lfm2", {r"\.shortconv\.conv\.weight$": lambda t, _: _add_dimension(t, 1, 3)}),
    "llama": ("llama", _ROTATED),
    "mamba": ("mamba", _MAMBA),
    "minimax_m2": ("minimax-m2", {}),
    "mistral": ("llama", _ROTATED),
    "nemotron": ("nemotron", _NORMS),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2moe", _SHARED_GATE),
    "qwen3": ("qwen3", {}),
    "qwen3_5_moe_text": ("qwen35moe", {**_LINEAR, **_SHARED_GATE}),
    "qwen3_5_text": ("qwen35", _LINEAR),
    "qwen3_moe": ("qwen3moe", {}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "t5": ("t5", {}),
    "umt5": ("t5", {}),
}  # fmt: skip
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"
#: Tensors that transformers computes: rope factors, and buffers that older versions saved.
_COMPUTED = (
    r"(.*\.)?rope_(freqs|factors_long|factors_short)\.weight"
    r"|(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)"
)


# ---- the rule


@dataclass(frozen=True, repr=False)
class _FromGguf(Rewriting, Renaming):
    """The conversion of a GGUF file to one model of transformers.

    Attributes:
        model: Name of the model's class.
        config: Its configuration.
        keys: Name in the model -> its keys in the file. Several keys are concatenated.
        computed: Pattern of keys that transformers computes itself.
        head: The name of the head, if the embedding is the head of a file that does not contain
            one. Else None.
    """

    model: str
    config: Any
    keys: Mapping[str, tuple[str, ...]]
    computed: str
    head: str | None

    def __repr__(self) -> str:
        return f"from_to('gguf->transformers', {self.model})"

    @property
    def hides_names(self) -> bool:
        return True

    def __call__(self, key: str) -> str | None:
        """Return the name of the first tensor that `key` becomes a part of."""
        found = next((name for name, keys in self.keys.items() if key in keys), key)
        return None if re.fullmatch(self.computed, key) else found

    def check(self, plain: Mapping[str, object], path: str) -> None:
        """Refuse a file whose metadata describes another model. See `Rewriting`."""
        architecture, _ = _GGUF[self.config.model_type]
        numbers = {"head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads"}
        facts = {"general.architecture": architecture} | {
            f"{architecture}.attention.{key}": str(value)
            for key, name in numbers.items()
            if isinstance(value := getattr(self.config, name, None), int)
        }
        for key, expected in facts.items():
            found = str(plain.get(key, expected))
            # For a list with a number per layer, the metadata shows only its length.
            if found != expected and not found.endswith(" values"):
                raise MismatchError(
                    "the file and the configuration describe different models",
                    file=path,
                    entry=key,
                    expected=f"{expected} for {self.model}",
                    found=found,
                    hint="Pass from_to the configuration that belongs to this file.",
                )

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name -> tensor. See `Rewriting`."""
        made, known = dict[str, Made](), set[str]()
        for name, keys in self.keys.items():
            fused = keys[0].replace("_gate_", "_gate_up_")
            if len(keys) > 1 and fused in items:  # newer files may contain them as one tensor
                keys = (fused,)
            known |= {*keys}
            if any(key in items for key in keys):
                add(made, name, self._make(name, keys, items), path)
        for key, item in items.items():
            if key not in known and not re.fullmatch(self.computed, key):
                add(made, key, item, path)
        if self.head is not None and _OUTPUT not in items and _EMBEDDING in items:
            # A copy of the entry: a plan takes the same entry for a tie.
            item = items[_EMBEDDING]
            add(made, self.head, item._replace(entry=item.entry._replace()), path)
        return made

    def _make(self, name: str, keys: Sequence[str], items: Mapping[str, Made]) -> Made:
        """Make a tensor of the model."""
        if missing := [key for key in keys if key not in items]:
            raise missing_members(name, missing)
        tensors: list[torch.Tensor] = [Unread.of(items[key]) for key in keys]
        try:
            tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors, -2)
            for pattern, change in _GGUF[self.config.model_type][1].items():
                if re.search(pattern, keys[0]):
                    tensor = change(tensor, self.config)
        except MISFITS as error:
            raise MismatchError(
                f"the tensor does not match the configuration: {error}",
                entry=keys[0],
                found=f"shape {list(tensors[0].shape)}",
            ) from None
        return made_of(tensor)


def _gguf(model: nn.Module) -> Renaming:
    config: Any = model.config
    if config.model_type not in _GGUF:
        raise ValueError(
            f"from_to does not support GGUF files of {config.model_type!r}. Supported: "
            f"{', '.join(sorted(_GGUF))}"
        )
    architecture, _ = _GGUF[config.model_type]
    keys: dict[str, tuple[str, ...]] = {}
    for key, name in _names(model, architecture).items():
        keys[name] = (*keys.get(name, ()), key)
    parameters = {name: id(one) for name, one in model.named_parameters(remove_duplicate=False)}
    names = {some[0]: name for name, some in keys.items()}
    head = names.get(_OUTPUT)
    if head and parameters[head] == parameters.get(str(names.get(_EMBEDDING))):
        head = None  # they are tied
    computed = _COMPUTED
    if architecture.startswith("qwen35"):
        # The layers after these predict further tokens. transformers does not have them.
        computed += rf"|blk\.{config.num_hidden_layers}\..*"
    return _FromGguf(type(model).__name__, config, keys, computed, head)


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
