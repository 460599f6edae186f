"""`from_to`: the names and the layout of transformers for what llama.cpp saved.

llama.cpp's converter (ggml-org/llama.cpp, convert_hf_to_gguf.py) does more than rename: it puts
the rows of q and k into another order, adds one to norms, joins and transposes. A step here undoes
each of these on byte ranges of the file. transformers' own ``TENSOR_PROCESSORS`` compute with NumPy
arrays, so a rank could not read its shard alone, and there is none for Qwen3.5 and for the groups
of heads of Falcon 40B. The names are those of the ``gguf`` package's own table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

# ---- what is done to a tensor besides its name


class _Step:
    """The inverse of an operation of llama.cpp's converter."""

    def apply(self, item: Made) -> Made:
        """Return the tensor as transformers has it."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Rows(_Step):
    """Rows in groups of groups, two levels of which are exchanged.

    Attributes:
        sizes: of the levels in the file, -1 for what is left of the rows.
        levels: the two.
        first: how many rows before them stay where they are.
        dim: the dimension that has the rows.
    """

    sizes: tuple[int, ...]
    levels: tuple[int, int]
    first: int = 0
    dim: int = 0

    def apply(self, item: Made) -> Made:
        if self.dim:
            upright = replace(self, dim=0).apply(transposed(item, (0, self.dim)))
            return transposed(upright, (0, self.dim))
        count, known = item.entry.shape[0] - self.first, abs(math.prod(self.sizes))
        if count % known or (count != known and -1 not in self.sizes):
            raise Unfit(f"the {count} rows of {item.keys[0]!r} are not {known} equal groups")
        full = [count // known if size == -1 else size for size in self.sizes]
        if 1 in (full[self.levels[0]], full[self.levels[1]]):
            return item
        stay, rows = chunked(item, 0, [self.first, count])
        rows = reshaped(transposed(_divided(rows, full), self.levels), rows.entry.shape)
        return concatenated([stay, rows], 0) if self.first else rows


def _divided(item: Made, sizes: Sequence[int]) -> Made:
    """Return a tensor whose first dimension is several."""
    return reshaped(item, (*sizes, *item.entry.shape[1:]))


@dataclass(frozen=True)
class _Grouped(_Step):
    """Rows of q, k and v one behind the other, which transformers has in groups of heads.

    Attributes:
        groups: heads of k and v.
        heads: of q, in each group.
    """

    groups: int
    heads: int

    def apply(self, item: Made) -> Made:
        rows = item.entry.shape[0]
        each = self._head(item)
        sizes = [each * self.groups * count for count in (self.heads, 1, 1)]
        grouped = [
            _divided(one, (self.groups, len_ // self.groups))
            for one, len_ in zip(chunked(item, 0, sizes), sizes, strict=True)
        ]
        return reshaped(concatenated(grouped, 1), (rows, *item.entry.shape[1:]))

    def _head(self, item: Made) -> int:
        rows, count = item.entry.shape[0], self.groups * (self.heads + 2)
        if rows % count:
            raise Unfit(f"the {rows} rows of {item.keys[0]!r} are not those of {count} heads")
        return rows // count


@dataclass(frozen=True)
class _Transposed(_Step):
    """A matrix that transformers has the other way round."""

    def apply(self, item: Made) -> Made:
        return transposed(item, (0, 1))


@dataclass(frozen=True)
class _Squeezed(_Step):
    """A tensor that the file has without a dimension of size 1, or with it.

    Attributes:
        dim: which one.
        dims: how many there are with it.
    """

    dim: int
    dims: int

    def apply(self, item: Made) -> Made:
        if len(item.entry.shape) >= self.dims:
            return item
        return Made(unsqueezed(item.entry, self.dim), item.keys)


@dataclass(frozen=True)
class _Computed(_Step):
    """Numbers that are others in the file: computed as they are copied, in float32.

    Attributes:
        name: the operation, see `TensorEntry.encoding`.
    """

    name: str

    def apply(self, item: Made) -> Made:
        return computed(item, self.name)


#: dtype -> what GGUF calls it.
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def computed(item: Made, name: str) -> Made:
    """Return a tensor of which something is computed: see `TensorEntry.encoding`."""
    entry = item.entry
    encoding = entry.encoding
    if entry.is_plain:
        if encoding or entry.dtype not in _TYPES:
            how = ", ".join([entry.dtype, *encoding])
            raise Unfit(f"{item.keys[0]!r} is stored as {how}, of which nothing can be computed")
        encoding = (_TYPES[entry.dtype],)
    made = entry._replace(
        dtype="float32", nbytes=4 * entry.numel, storage="", encoding=(*encoding, name)
    )
    return Made(made, item.keys)


# ---- the rule


@dataclass(frozen=True)
class _Line:
    """A tensor of a model, and what a file has for it.

    Attributes:
        there: keys in the file: of several, the rows follow each other in one dimension.
        here: name in the model.
        steps: what else is done, from the file to the model.
    """

    there: tuple[str, ...]
    here: str
    steps: tuple[_Step, ...] = ()

    def make(self, items: Mapping[str, Made]) -> Made:
        """Return the tensor of the model."""
        if missing := [key for key in self.there if key not in items]:
            raise missing_members(self.here, missing)
        item = items[self.there[0]]
        if len(self.there) > 1:
            item = concatenated([items[key] for key in self.there], -2)
        for step in self.steps:
            item = step.apply(item)
        return item


@dataclass(frozen=True, repr=False)
class _FromGguf(Rewriting, Renaming):
    """The tensors of GGUF files as those of a model of transformers.

    Attributes:
        architecture: the class of the model.
        lines: what there is.
        computed: pattern of keys in the file that transformers computes itself.
        head: key of the head, key of the embedding, and name of the head, if a file without a head
            has its embedding as one.
        facts: (key of the metadata, its text) of a file that belongs to this model.
    """

    architecture: str
    lines: tuple[_Line, ...]
    computed: str
    head: tuple[str, str, str] | None
    facts: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"from_to('gguf->transformers', {self.architecture})"

    def __call__(self, key: str) -> str | None:
        """Return the name of the first tensor that values of `key` go to."""
        found = next((line.here for line in self.lines if key in line.there), key)
        return None if re.fullmatch(self.computed, key) else found

    def check(self, plain: Mapping[str, object], path: str) -> None:
        """Refuse a file that says that it is of another model; see `Rewriting`."""
        for key, expected in self.facts:
            found = str(plain.get(key, expected))
            # Of a list, which has a number for each layer, the metadata has the length alone.
            if found != expected and not found.endswith(" values"):
                raise MismatchError(
                    "the file is of another model than the configuration",
                    file=path,
                    entry=key,
                    expected=f"{expected} for {self.architecture}",
                    found=found,
                    hint="Pass from_to the configuration that belongs to this file.",
                )

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name -> tensor; see `Rewriting`."""
        lines: dict[str, list[_Line]] = {}
        for line in self.lines:
            for key in line.there:
                lines.setdefault(key, []).append(line)
        made: dict[str, Made] = {}
        for key, item in items.items():
            if key not in lines and not re.fullmatch(self.computed, key):
                add(made, key, item, path)
            for line in lines.get(key, ()):
                # A tensor made of several keys is made at the first of them that the file has.
                if key != next(one for one in line.there if one in items):
                    continue
                try:
                    found = line.make(items)
                except Unfit as error:
                    raise MismatchError(
                        "it is not what llama.cpp makes of the model of this configuration: "
                        f"{error}",
                        entry=key,
                    ) from None
                add(made, line.here, found, path)
        if self.head is not None:
            head, embedding, name = self.head
            if head not in items and embedding in items:
                # Another entry: for a plan the same one is one tensor under another name.
                item = items[embedding]
                add(made, name, item._replace(entry=item.entry._replace()), path)
        return made


# ---- GGUF


_Steps = tuple[tuple[str, Callable[[Any], _Step]], ...]


def _heads(config: Any, name: str = "num_attention_heads") -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"the {type(config).__name__} does not say how many {name} there are")
    return found


def _falcon(config: Any) -> _Step:
    if not (config.new_decoder_architecture or config.multi_query):
        raise ValueError("falcon without multi_query: llama.cpp has no layout for it")
    groups = _heads(config, "num_kv_heads") if config.new_decoder_architecture else 1
    return _Grouped(groups, _heads(config) // groups)


#: The rows of q and k, which llama.cpp has so that the two numbers of a rotation are neighbours.
_ROTATED: _Steps = (
    (r"\.attn_q\.", lambda c: _Rows((_heads(c), -1, 2), (1, 2))),
    (r"\.attn_k\.", lambda c: _Rows((_heads(c, "num_key_value_heads"), -1, 2), (1, 2))),
)
_NORMS: _Steps = ((r"norm\.weight$", lambda _: _Computed("minus one")),)
_MAMBA: _Steps = (
    (r"\.ssm_conv1d\.weight$", lambda _: _Squeezed(1, 3)),
    (r"\.ssm_a$", lambda _: _Computed("log of negative")),
)
_CONV1D = r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$"
_SHARED_GATE: _Steps = ((r"\.ffn_gate_inp_shexp\.", lambda _: _Squeezed(0, 2)),)


def _of_value_heads(config: Any, *sizes: int, dim: int = 0, behind_qk: bool = False) -> _Step:
    """Return the step for heads of v, which llama.cpp has ordered by their number in a group."""
    groups = _heads(config, "linear_num_key_heads")
    heads = _heads(config, "linear_num_value_heads") // groups
    first = 2 * groups * config.linear_key_head_dim if behind_qk else 0
    return _Rows((heads, groups, *sizes), (0, 1), first, dim)


_LINEAR: _Steps = (
    (r"(?<!ssm)_norm\.weight$", lambda _: _Computed("minus one")),
    (r"\.(ssm_a|ssm_dt\.bias|ssm_alpha\.weight|ssm_beta\.weight)$", _of_value_heads),
    (r"\.attn_gate\.weight$", lambda c: _of_value_heads(c, -1)),
    (r"\.(attn_qkv|ssm_conv1d)\.weight$", lambda c: _of_value_heads(c, -1, behind_qk=True)),
    (r"\.ssm_out\.weight$", lambda c: _of_value_heads(c, -1, dim=1)),
    *_MAMBA,
)
#: model_type of transformers -> architecture of GGUF, and what is done besides renaming: (pattern
#: of keys, step). Every one is compared with what transformers itself reads, in the tests.
_GGUF: dict[str, tuple[str, _Steps]] = {
    "bloom": ("bloom", ((r"\.attn_qkv\.", lambda c: _Rows((3, _heads(c), -1), (0, 1))),)),
    "falcon": ("falcon", ((r"\.attn_qkv\.", _falcon),)),
    "gemma2": ("gemma2", _NORMS),
    "gemma3_text": ("gemma3", _NORMS),
    "gpt2": ("gpt2", ((_CONV1D, lambda _: _Transposed()),)),
    "lfm2": ("lfm2", ((r"\.shortconv\.conv\.weight$", lambda _: _Squeezed(1, 3)),)),
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
#: What each side computes itself: factors in a file, and buffers that older transformers saved.
_COMPUTED = (
    r"(.*\.)?rope_(freqs|factors_long|factors_short)\.weight"
    r"|(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)"
)


def _gguf(model: nn.Module) -> Renaming:
    config: Any = model.config
    kind = config.model_type
    if kind not in _GGUF:
        raise ValueError(
            f"from_to: no rule is known to be right for GGUF files of {kind!r}; there are rules "
            f"for {', '.join(sorted(_GGUF))}"
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
        if len(there) > 1:  # newer files may have them as one
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
        # Behind the layers are those that predict further tokens, which transformers has not.
        without += rf"|blk\.{config.num_hidden_layers}\..*"
    return _FromGguf(
        architecture=type(model).__name__,
        lines=tuple(lines),
        computed=without,
        head=None if is_shared or head is None else (_OUTPUT, _EMBEDDING, head),
        facts=tuple(facts.items()),
    )


def _names(model: nn.Module, architecture: str) -> dict[str, str]:
    """Return key in GGUF files -> name in the model, by transformers' own map."""
    library: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    config: Any = model.config
    # The processor of Qwen2-MoE knows the experts of the other models, too.
    kinds = library.TENSOR_PROCESSORS
    processor = kinds.get(architecture, kinds["qwen2moe"])({})
    count = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", None) or 0)
    # The map finds a base model inside of another one only: without its prefix MambaModel gets
    # the norm of layer 0 for `output_norm`.
    prefix = str(getattr(model, "base_model_prefix", ""))
    whole = model if hasattr(model, prefix) else nn.Module()
    if whole is not model:
        whole.add_module(prefix or "model", model)
    try:
        names = library.get_gguf_hf_weights_map(whole, processor, architecture, count)
    except ImportError as error:
        raise ImportError(
            "from_to needs the names of GGUF, which the gguf package has: pip install gguf"
        ) from error
    found: dict[str, str] = {}
    for key, name in names.items():
        if whole is not model:
            name = name.partition(".")[2]
        # The map has experts without the suffix that files have, and fused ones for Qwen3.5.
        key += ".weight" * key.endswith("_exps")
        found |= {key.replace("_gate_up_exps", f"_{one}_exps"): name for one in ("gate", "up")}
    for name in model.state_dict():
        if layer := re.search(r"\.(\d+)\.linear_attn\.dt_bias$", name):  # the map lacks it
            found[f"blk.{layer[1]}.ssm_dt.bias"] = name
    return found


#: A kind that there was -> what to write instead.
_GONE = {
    "transformers->gguf": "Write GGUF files with llama.cpp's convert_hf_to_gguf.py.",
    "whisper->transformers": "Use remap.rules with the table of the migration guide.",
    "transformers->whisper": "Use remap.rules with the table of the migration guide.",
}


def from_to(kind: str, model_or_config: Any) -> Renaming:
    """Return the rename from the tensors of a GGUF file to those of a model of transformers.

    It knows these kinds of models: ``bloom``, ``falcon``, ``gemma2``, ``gemma3_text``, ``gpt2``,
    ``lfm2``, ``llama``, ``mamba``, ``minimax_m2``, ``mistral``, ``nemotron``, ``phi3``, ``qwen2``,
    ``qwen2_moe``, ``qwen3``, ``qwen3_5_moe_text``, ``qwen3_5_text``, ``qwen3_moe``, ``stablelm``,
    ``starcoder2``, ``t5``, ``umt5``.

    Names alone are not enough. llama.cpp has the rows of q and k of LLaMA in another order, adds
    one to the norms of Gemma, and puts experts and q, k and v together or apart. This rename undoes
    all of it on the bytes of the file. On a mesh each rank reads its own shards. Quantised blocks
    become numbers as they are copied, in blocks. A parameter that holds blocks (uint8, as many
    bytes in a row) keeps them as they are.

    Args:
        kind: ``"gguf->transformers"``.
        model_or_config: A model of transformers, live or a skeleton; or its configuration, which
            must name its class (``architectures``). A file with other heads in its metadata is
            refused.

    Returns:
        A rename, which composes. It drops tensors that transformers computes (``rope_freqs``). A
        file without a head (``output.weight``) uses its embedding as the head.

    Raises:
        ValueError: If the kind or the architecture is not known, or if the configuration lacks a
            number that the rule needs.
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
        hint = _GONE.get(kind, "")
        raise ValueError(f"from_to({kind!r}): expected 'gguf->transformers'. {hint}".rstrip())
    return _gguf(model_of("from_to", model_or_config))
