"""`from_to`: what transformers calls and how it lays out what llama.cpp and openai-whisper saved.

llama.cpp's converter (ggml-org/llama.cpp, convert_hf_to_gguf.py) does more than rename: it puts
the rows of q and k into another order, adds one to norms, joins and transposes. Each of these is a
step here, which is taken back on boxes of the file, or its way back. The names are those of the
``gguf`` package's own table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from torchlift._plan import Made, Rewriting
from torchlift._system.text import clipped_list
from torchlift.errors import MismatchError
from torchlift.formats import squeezed, unsqueezed
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

# ---- what is done to a tensor besides its name: from there to transformers, and back


class _Step:
    """What an operation of llama.cpp's converter is undone by, and done again."""

    def here(self, item: Made) -> Made:
        """Return the tensor as transformers has it."""
        raise NotImplementedError

    def there(self, item: Made) -> Made:
        """Return the tensor as the file has it."""
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

    def here(self, item: Made) -> Made:
        if self.dim:
            upright = replace(self, dim=0).here(transposed(item, (0, self.dim)))
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

    def there(self, item: Made) -> Made:
        one, two = self.levels
        sizes = [*self.sizes]
        sizes[one], sizes[two] = sizes[two], sizes[one]
        return replace(self, sizes=tuple(sizes)).here(item)


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

    def here(self, item: Made) -> Made:
        rows = item.entry.shape[0]
        each = self._head(item)
        sizes = [each * self.groups * count for count in (self.heads, 1, 1)]
        grouped = [
            _divided(one, (self.groups, len_ // self.groups))
            for one, len_ in zip(chunked(item, 0, sizes), sizes, strict=True)
        ]
        return reshaped(concatenated(grouped, 1), (rows, *item.entry.shape[1:]))

    def there(self, item: Made) -> Made:
        rows, *rest = item.entry.shape
        each = self._head(item)
        grouped = _divided(item, (self.groups, rows // self.groups))
        apart = chunked(grouped, 1, [each * self.heads, each, each])
        flat = [reshaped(one, (math.prod(one.entry.shape[:2]), *rest)) for one in apart]
        return concatenated(flat, 0)

    def _head(self, item: Made) -> int:
        rows, count = item.entry.shape[0], self.groups * (self.heads + 2)
        if rows % count:
            raise Unfit(f"the {rows} rows of {item.keys[0]!r} are not those of {count} heads")
        return rows // count


@dataclass(frozen=True)
class _Transposed(_Step):
    """A matrix that transformers has the other way round."""

    def here(self, item: Made) -> Made:
        return transposed(item, (0, 1))

    there = here


@dataclass(frozen=True)
class _Squeezed(_Step):
    """A tensor that the file has without a dimension of size 1, or with it.

    Attributes:
        dim: which one.
        dims: how many there are with it.
    """

    dim: int
    dims: int

    def here(self, item: Made) -> Made:
        if len(item.entry.shape) >= self.dims:
            return item
        return Made(unsqueezed(item.entry, self.dim), item.keys)

    def there(self, item: Made) -> Made:
        return Made(squeezed(item.entry, self.dim), item.keys)


@dataclass(frozen=True)
class _Computed(_Step):
    """Numbers that are others in the file: computed as they are copied, in float32.

    Attributes:
        back: what makes those of transformers of them.
        forth: what makes them of those.
    """

    back: str
    forth: str

    def here(self, item: Made) -> Made:
        return computed(item, self.back)

    def there(self, item: Made) -> Made:
        return computed(item, self.forth)


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

    def to_here(self, items: Mapping[str, Made]) -> Made:
        """Return the tensor of the model."""
        if missing := [key for key in self.there if key not in items]:
            raise missing_members(self.here, missing)
        item = items[self.there[0]]
        if len(self.there) > 1:
            item = concatenated([items[key] for key in self.there], -2)
        for step in self.steps:
            item = step.here(item)
        return item

    def to_there(self, item: Made) -> dict[str, Made]:
        """Return key -> tensor of the file."""
        for step in self.steps[::-1]:
            item = step.there(item)
        if len(self.there) == 1:
            return {self.there[0]: item}
        size, count = item.entry.shape[-2], len(self.there)
        if size % count:
            raise Unfit(f"{item.keys[0]!r} has {size} rows, which are not {count} equal slices")
        slices = chunked(item, -2, [size // count] * count)
        return dict(zip(self.there, slices, strict=True))


@dataclass(frozen=True, repr=False)
class _Between(Rewriting, Renaming):
    """The tensors of another program's files, and those of a model of transformers.

    Attributes:
        program: whose files they are.
        architecture: the class of the model.
        lines: what there is.
        computed: pattern of keys in the file, or of names in the model, that have no counterpart:
            the other program computes them, or ties them.
        tied: name in the model that the file has no key for -> one that it is tied to, for which
            there is a line.
        shared: key of the head, key of the embedding that is the head, too, in a file without one,
            and name of the head.
        facts: (key of the metadata or of a leaf, its text) of a file that belongs to this model.
        saves: whether this is the way back.
    """

    program: str
    architecture: str
    lines: tuple[_Line, ...]
    computed: str
    tied: Mapping[str, str] = field(default_factory=dict, hash=False)
    shared: tuple[str, str, str] | None = None
    facts: tuple[tuple[str, str], ...] = ()
    saves: bool = False

    def __repr__(self) -> str:
        ends = (self.program, "transformers")
        return f"from_to({'->'.join(ends[::-1] if self.saves else ends)!r}, {self.architecture})"

    def reversed(self) -> _Between:
        """Return the rule for the way back."""
        return replace(self, saves=not self.saves)

    def __call__(self, key: str) -> str | None:
        """Return the name of the first tensor that values of `key` go to."""
        if self.saves:
            key = self.tied.get(key, key)
        for line in self.lines:
            if key == line.here if self.saves else key in line.there:
                return line.there[0] if self.saves else line.here
        return None if re.fullmatch(self.computed, key) else key

    def check(self, plain: Mapping[str, object], path: str) -> None:
        """Refuse a file that says that it is of another model; see `Rewriting`."""
        for key, expected in () if self.saves else self.facts:
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
            for key in (line.here,) if self.saves else line.there:
                lines.setdefault(key, []).append(line)
        made: dict[str, Made] = {}
        done: set[str] = set()
        if self.saves:
            # Of a name and those tied to it a file may have any, or several.
            tied = self.tied
            items = {
                tied.get(key, key): v for key, v in items.items() if tied.get(key) not in items
            }
        others = {key for key in items if key not in lines and not re.fullmatch(self.computed, key)}
        if self.saves and others:
            names = [key for key in items if key in others]
            raise MismatchError(
                f"no rule says what {self.program} calls {clipped_list(map(repr, names))}",
                hint="Leave out what its files are not to have: exclude=[...].",
                unexpected_keys=names,
            )
        for key, item in items.items():
            if key in others:
                add(made, key, item, path)
            for line in lines.get(key, ()):
                if line.here in done:
                    continue
                done.add(line.here)
                try:
                    found = line.to_there(item) if self.saves else {line.here: line.to_here(items)}
                except Unfit as error:
                    raise MismatchError(
                        f"it is not what {self.program} makes of the model of this configuration: "
                        f"{error}",
                        entry=key,
                    ) from None
                for name, one in found.items():
                    add(made, name, one, path)
        if self.shared is not None and not self.saves:
            head, embedding, name = self.shared
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
_NORMS: _Steps = ((r"norm\.weight$", lambda _: _Computed("minus one", "plus one")),)
_MAMBA: _Steps = (
    (r"\.ssm_conv1d\.weight$", lambda _: _Squeezed(1, 3)),
    (r"\.ssm_a$", lambda _: _Computed("log of negative", "negative exp")),
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
    (r"(?<!ssm)_norm\.weight$", lambda _: _Computed("minus one", "plus one")),
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
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise ImportError(
            "from_to needs the names of GGUF, which the gguf package has: pip install gguf"
        ) from error
    architecture, rules = _GGUF[kind]
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    count = max(config.num_hidden_layers, getattr(config, "num_decoder_layers", None) or 0)
    table = get_tensor_name_map(number, count)
    steps = [(re.compile(pattern), make(config)) for pattern, make in rules]
    parameters = {name: id(one) for name, one in model.named_parameters(remove_duplicate=False)}
    lines: dict[tuple[object, ...], _Line] = {}
    for name in model.state_dict():
        keys = _keys(name, table, str(getattr(model, "base_model_prefix", "")))
        taken = tuple(step for pattern, step in steps if keys and pattern.search(keys[0]))
        if keys:  # of tied names that are one in the file, the first
            lines.setdefault((keys, parameters.get(name)), _Line(keys, name, taken))
        if len(keys) > 1:  # which newer files may have as one
            fused = keys[0].replace("_gate_", "_gate_up_")
            lines[fused, name] = _Line((fused,), name, taken)
    names = {line.there[0]: line.here for line in lines.values()}
    known = {line.here: None for line in lines.values()}
    first = {parameters.get(name): name for name in reversed(known)}
    tied = {
        name: first[one] for name, one in parameters.items() if one in first and name not in known
    }
    head, embedding = names.get(_OUTPUT), names.get(_EMBEDDING)
    shared = None
    if head is not None and parameters[head] != parameters.get(str(embedding)):
        shared = _OUTPUT, _EMBEDDING, head
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
        without += rf"|blk\.{count}\..*"
    return _Between(
        program="gguf",
        architecture=type(model).__name__,
        lines=tuple(lines.values()),
        computed=without,
        tied=tied,
        shared=shared,
        facts=tuple(facts.items()),
    )


def _keys(name: str, table: Any, prefix: str) -> tuple[str, ...]:
    """Return the keys that GGUF files have for a name of transformers, if any."""
    base, end = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias"), ""
    for suffix, key_suffix in ((".weight", ".weight"), (".bias", ".bias"), ("_bias", ".bias")):
        if base.endswith(suffix):
            base, end = base.removesuffix(suffix), key_suffix
            break
    fused = base.endswith(".experts.gate_up_proj")
    if fused:
        base = base.replace("gate_up_proj", "down_proj")
    within = base.removeprefix(prefix + ".")
    found = next(filter(None, map(table.get_name, (base, within, f"{prefix}.{base}"))), None)
    if found is None:
        return ()
    end = end or ".weight" * found.endswith("_exps")
    names = [found.replace("_down_", f"_{one}_") for one in ("gate", "up")] if fused else [found]
    return tuple(one + end for one in names)


# ---- openai-whisper


#: Of names: what transformers has -> what openai-whisper has, each in turn.
_WHISPER = (
    (r"^(encoder|decoder)\.layers\.", r"\1.blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"\.embed_positions\.weight$", ".positional_embedding"),
    (r"\.embed_tokens\.", ".token_embedding."),
)


def _whisper(model: nn.Module) -> Renaming:
    config: Any = model.config
    if config.model_type != "whisper":
        raise ValueError(f"from_to: a {type(config).__name__} is no configuration of Whisper")
    lines = []
    for name in model.state_dict():
        key = name.removeprefix("model.")
        if key.startswith(("encoder.", "decoder.")):
            for pattern, replacement in _WHISPER:
                key = re.sub(pattern, replacement, key)
            lines.append(_Line((key,), name))
    if not getattr(config, "tie_word_embeddings", True):
        raise ValueError(
            "from_to: openai-whisper has no head apart from its embeddings, as this has"
        )
    return _Between(
        program="whisper",
        architecture=type(model).__name__,
        lines=tuple(lines),
        computed=r"(decoder\.mask|alignment_heads|proj_out\.weight)",
        facts=(
            ("dims.n_audio_head", str(config.encoder_attention_heads)),
            ("dims.n_text_head", str(config.decoder_attention_heads)),
        ),
    )


_PROGRAMS: dict[str, Callable[[nn.Module], Renaming]] = {"gguf": _gguf, "whisper": _whisper}


def from_to(kind: str, model_or_config: Any) -> Renaming:
    """Return the rename between llama.cpp's or openai-whisper's tensors and those of transformers.

    Of GGUF it knows these kinds of models: ``bloom``, ``falcon``, ``gemma2``, ``gemma3_text``,
    ``gpt2``, ``lfm2``, ``llama``, ``mamba``, ``minimax_m2``, ``mistral``, ``nemotron``,
    ``phi3``, ``qwen2``, ``qwen2_moe``, ``qwen3``, ``qwen3_5_moe_text``, ``qwen3_5_text``,
    ``qwen3_moe``, ``stablelm``, ``starcoder2``, ``t5``, ``umt5``.

    Names alone are not enough. llama.cpp has the rows of q and k of LLaMA in another order, adds
    one to the norms of Gemma, puts experts and q, k and v together or apart: by rules of names
    alone a GGUF file loads without an error and computes something else. This one does all of it,
    on the bytes of the file: no tensor is in memory twice, on a mesh each rank reads its own
    shards, and quantised blocks become numbers as they are copied, some at a time. Where a
    parameter holds blocks (uint8, as many bytes in a row), they stay as they are.

    Args:
        kind: ``"gguf->transformers"``, ``"transformers->gguf"``, ``"whisper->transformers"`` (a
            ``.pt`` of openai-whisper, with ``root="model_state_dict"``) or
            ``"transformers->whisper"``.
        model_or_config: a model of transformers, live or a skeleton; or its configuration, which
            must name its class (``architectures``). It is that of the file: sizes, heads. A file
            that says that it has other heads (in its metadata; ``dims`` of Whisper) is refused.

    Returns:
        A rename, which composes, and whose ``reversed()`` is the rule for the way back. What the
        library computes itself (``rope_freqs.weight``) is dropped; a file without a head
        (``output.weight``) has its embedding as one. From transformers, tied names for which the
        other program has one become that one; what it has no name for is a `MismatchError`.

    Raises:
        ValueError: there is no such kind; no rule is known to be right for this architecture; or
            the configuration lacks a number that the rule needs.
        TypeError: it is no model of transformers and no configuration that names one.
        ImportError: transformers is not installed or, for GGUF, the ``gguf`` package.

    Example:
        >>> import torchlift, transformers
        >>> from torchlift import remap
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=1, vocab_size=16)
        >>> model = torchlift.skeleton(transformers.LlamaForCausalLM, config)
        >>> rename = remap.from_to("gguf->transformers", model)
        >>> rename
        from_to('gguf->transformers', LlamaForCausalLM)
        >>> rename("blk.0.attn_q.weight")
        'model.layers.0.self_attn.q_proj.weight'
        >>> rename.reversed()("lm_head.weight")
        'output.weight'
    """
    kinds = [
        way for name in _PROGRAMS for way in (f"{name}->transformers", f"transformers->{name}")
    ]
    if kind not in kinds:
        raise ValueError(f"from_to({kind!r}): expected one of {', '.join(kinds)}")
    program = next(name for name in kind.split("->") if name != "transformers")
    rule = _PROGRAMS[program](model_of("from_to", model_or_config))
    return rule if kind.startswith(program) else rule.reversed()
