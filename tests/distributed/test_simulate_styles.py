"""What tensor parallel cuts of the models that people have, and what nobody said about the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torchlift
from torchlift.distributed.meshes import stages
from torchlift.distributed.simulation import simulate
from torchlift.distributed.styles import Styles

#: Styles of transformers, by what they cut of a parameter of a linear layer or a stack of them.
OUTPUTS = ("colwise", "colwise_gather_output", "packed_colwise")
INPUTS = ("rowwise", "rowwise_split_input", "packed_rowwise")
#: The plan of one model keeps its vocabulary whole; Megatron's and vLLM's cut it.
EXCEPTIONS = {("Inkling2TextConfig", "embed_tokens")}


def _configs() -> Iterator[type]:
    """Every configuration of transformers that has a plan, parts of models among them."""
    seen: set[type] = set()
    todo = [CONFIG_MAPPING[name] for name in CONFIG_MAPPING]
    while todo:
        config = todo.pop()
        if config not in seen:
            seen.add(config)
            todo += [c for c in config.sub_configs.values() if hasattr(c, "model_type")]
    for config in sorted(seen, key=lambda c: c.__name__):
        if isinstance(getattr(config, "base_model_tp_plan", None), dict):
            yield config


def _dim(style: str, key: str, shape: tuple[int, ...]) -> int | None:
    """What transformers' style cuts: see its ``distributed.tensor_parallel``."""
    if style in OUTPUTS:
        return max(len(shape) - 2, 0)
    if style in INPUTS:
        return None if len(shape) < 2 or key.endswith("bias") else len(shape) - 1
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def _parameters(plan: dict[str, str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A parameter for each entry of a plan, with its style and a shape that goes with it."""
    turned = "packed_rowwise" in plan.values()
    shapes: dict[str, tuple[int, ...]] = {
        "experts.gate_up_proj": (4, 6, 10) if turned else (4, 10, 6),
        "experts.down_proj": (4, 5, 6) if turned else (4, 6, 5),
        "experts.up_proj": (4, 5, 6),
        "self_attn.sinks": (8,),
        "self_attn.gate_bias": (8,),
    }
    found = {}
    for pattern, style in plan.items():
        ends = [end for end in shapes if pattern.endswith("." + end)]
        key = "model." + pattern.replace("*", "7") + ("" if ends else ".weight")
        found[key] = style, shapes[ends[0]] if ends else (12, 12)
        if style in (*OUTPUTS, *INPUTS) and not ends:
            found[key.removesuffix("weight") + "bias"] = style, (12,)
    return found


def test_the_plan_of_every_configuration_in_transformers_is_known() -> None:
    """Every parameter that one of them names is cut as it says, on its name and shape alone."""
    configs = list(_configs())
    wrong = []
    for config in configs:
        parameters = _parameters(config.base_model_tp_plan)
        style = Styles(None, {key: shape for key, (_, shape) in parameters.items()})
        for key, (said, shape) in parameters.items():
            expected = _dim(said, key, shape)
            if style(key, shape) != expected:
                wrong.append((config.__name__, key.removeprefix("model."), said))
    assert len(configs) > 50
    assert [w for w in wrong if (w[0], w[1].removesuffix(".weight")) not in EXCEPTIONS] == []


ENCODERS = {
    "t5": hf.T5ForConditionalGeneration, "bert": hf.BertForMaskedLM,
    "roberta": hf.RobertaForMaskedLM, "distilbert": hf.DistilBertModel,
    "modernbert": hf.ModernBertModel,
}  # fmt: skip


def _made(name: str, **words: object) -> nn.Module:
    config = CONFIG_MAPPING[name](**words)
    kind = ENCODERS.get(name) or hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model: nn.Module = torchlift.skeleton(kind, config)
    return model


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "gemma3_text", "phi3",
    "gpt_neox", "llama4_text", "aria_text", "deepseek_v2", "starcoder2", "gpt_oss", "gpt2", "bert",
    "roberta", "opt", "bloom", "falcon", "gptj", "distilbert", "modernbert", "gpt_bigcode",
])  # fmt: skip
def test_a_model_has_nothing_that_nobody_knows(name: str) -> None:
    """Built, not just named: what a plan of its own has is cut so, and no matrix is left over."""
    model = _made(name)
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    styles = Styles(None, shapes)
    plan = type(model.config).base_model_tp_plan or {}
    for key, shape in shapes.items():
        known, dim, packed = styles.find(key, shape)
        assert known or len(shape) < 2, key
        inner = ".".join("*" if p.isdecimal() else p for p in key.split(".")[1:])
        said = plan.get(inner) or plan.get(inner.rpartition(".")[0])
        if said is not None:
            assert dim == _dim(said, key, shape), key
            assert (packed == 2) == said.startswith("packed"), key


def test_layers_of_gpt2_lie_the_other_way_round() -> None:
    """Its inputs come first: columns are dimension 1, and the square matrix is told by the rest."""
    model = _made("gpt2")
    style = Styles(None, {key: tuple(p.shape) for key, p in model.named_parameters()})
    stem = "transformer.h.3"
    assert style(f"{stem}.attn.c_attn.weight", (768, 2304)) == 1
    assert style(f"{stem}.attn.c_attn.bias", (2304,)) == 0
    assert style(f"{stem}.attn.c_proj.weight", (768, 768)) == 0
    assert style(f"{stem}.attn.c_proj.bias", (768,)) is None
    assert style(f"{stem}.mlp.c_fc.weight", (768, 3072)) == 1
    assert Styles(None)(f"{stem}.attn.c_proj.weight", (768, 768)) == 1


def test_t5_is_cut_and_its_distances_are_named() -> None:
    """Nobody agrees on the table of relative positions: it is whole, and listed."""
    found = simulate(_made("t5"), "tp=8")
    assert {key.rpartition("layer.")[2] for key in found.unstyled} == {
        "0.SelfAttention.relative_attention_bias.weight"
    }
    assert max(found.bytes) < 1.01 * found.nbytes / 8


def test_a_table_of_positions_in_a_file_is_whole_on_purpose() -> None:
    """A buffer that older encoders saved is no matrix for want of a style."""
    found = Styles(None).find("embeddings.position_ids", (1, 512))
    assert found.known
    assert found.dim is None


class Unknown(nn.Module):
    """Two kinds of layers that no model is known for, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.bottleneck = nn.Linear(4, 8)
        self.q_proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.zeros(8, 8))


def test_what_no_style_is_known_for_is_said() -> None:
    """How many, how much, the largest, and the way out; norms, biases and buffers are no news."""
    model = torchlift.skeleton(Unknown)
    found = simulate(model, "fsdp=2,tp=2")
    assert found.unstyled == {
        "layers.0.weight": 128, "layers.1.weight": 128, "layers.2.weight": 128,
        "bottleneck.weight": 128,
    }  # fmt: skip
    assert (
        "  tp leaves 4 matrices, 512 B, whole, as no style is known for them: layers.*.weight (3), "
        'bottleneck.weight; say it with tp={"pattern": dimension, "*": "usual"}, or --tp '
        "PATTERN=DIMENSION"
    ) in str(found).split("\n")
    assert found.to_dict()["unstyled"] == found.unstyled
    for mesh in ("fsdp=2", "tp=1"):
        assert simulate(model, mesh).unstyled == {}
        assert "tp leaves" not in str(simulate(model, mesh))
    own = simulate(model, "tp=2", tp=lambda key, shape: None)
    assert own.unstyled == {}


def test_saying_it_adds_to_what_is_known() -> None:
    """Patterns come before the usual names, and what is said to be whole is not unknown."""
    model = torchlift.skeleton(Unknown)
    found = simulate(model, "tp=2", tp={"layers.*": 0, "bottleneck": None, "*": "usual"})
    assert (found.unstyled, found.unused) == ({}, ())
    whole = 4 * (4 * 8 + 8) + 4 * 2 * 8 + 4 * 64
    assert found.bytes == (whole + (3 * 4 * (32 + 4) + 4 * 72) // 2,) * 2
    alone = simulate(model, "tp=2", tp={"layers.*": 0})
    assert set(alone.unstyled) == {"q_proj.weight", "bottleneck.weight"}
    useless = simulate(model, "tp=2", tp={"nowhere": 0, "layers.*": 5, "*": "usual"})
    assert useless.unused == ("nowhere", "layers.*")
    assert "  tp= matches no parameter with such a dimension: 'nowhere', 'layers.*'" in str(useless)


def test_a_plan_of_transformers_can_be_passed_as_it_is() -> None:
    """With the prefix of the model's head; what it leaves out is whole, and listed."""
    model = _made("mixtral", num_hidden_layers=2)
    plan = {f"model.{key}": style for key, style in model.config.base_model_tp_plan.items()}
    found = simulate(model, "tp=8", tp=plan)
    guess = simulate(model, "tp=8", tp={"lm_head": None, "*embed_tokens": None, "*": "usual"})
    assert found.bytes == guess.bytes
    assert {key.split(".")[-2] for key in found.unstyled} == {"embed_tokens", "lm_head", "gate"}


def test_of_two_matrices_in_one_a_rank_reads_a_part_of_each() -> None:
    """The gates and what they gate of every expert are byte ranges of their own."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Module()
            self.experts.gate_up_proj = nn.Parameter(torch.zeros(3, 10, 4))
            self.experts.down_proj = nn.Parameter(torch.zeros(3, 4, 5))

    model = torchlift.skeleton(Experts)
    found = simulate(model, "tp=2")
    assert found.bytes == (4 * 3 * (4 * 6 + 4 * 3), 4 * 3 * (4 * 4 + 4 * 2))
    assert found.requests == (3 * 2 + 12, 3 * 2 + 12)
    assert sum(simulate(model, "fsdp=2,tp=2", shard={"*gate_up_proj": -1}).bytes) == found.nbytes
    tp = {"*gate_up_proj": "packed_colwise", "*": None}
    assert found.bytes[0] - simulate(model, "tp=2", tp=tp).bytes[0] == 4 * 3 * 4 * (3 - 5)
    rows = torchlift.skeleton(nn.Linear, 3, 12, bias=False)
    plain = simulate(rows, "fsdp=3,tp=2", tp={"*": "packed_colwise"})
    assert plain.bytes == (24,) * 6
    assert plain.requests == (1, 1, 2, 2, 1, 1)


def test_fsdp_cuts_where_it_is_told_and_nothing_that_it_ignores() -> None:
    """Rows of a transposed cut are byte ranges of their own."""
    model = torchlift.skeleton(nn.Linear, 8, 6)
    plain = simulate(model, "fsdp=4")
    assert plain.bytes == (72, 72, 72, 0)
    found = simulate(model, "fsdp=4", shard={"weight": 1})
    assert found.bytes == (48 + 8, 48 + 8, 48 + 8, 48)
    assert found.requests == (7, 7, 7, 6)
    assert simulate(model, "fsdp=4", shard=lambda key, shape: len(shape) - 1) == found
    found = simulate(model, "fsdp=4", ignored=["weight"])
    assert found.bytes == (200, 200, 200, 192)
    assert simulate(model, "fsdp=4", ignored="*").bytes == (216,) * 4
    assert simulate(model, "fsdp=2,tp=2", tp={"*": 0}, ignored="*").bytes == (108,) * 4


@pytest.mark.parametrize(
    ("mesh", "words", "said"),
    [
        ("tp=2", {"shard": {"*": 0}}, "are for a mesh with a dimension such as fsdp=8"),
        ("dp=2", {"ignored": ["*"]}, "are for a mesh with a dimension such as fsdp=8"),
        ("fsdp=2", {"shard": {"nowhere": 0}}, "no parameter matches 'nowhere'"),
        ("fsdp=2", {"ignored": ["a", "b"]}, "no parameter matches 'a', 'b'"),
        ("fsdp=2", {"shard": {"bias": 1}}, r"bias of shape \[6\] has no dimension 1"),
        ("fsdp=2", {"shard": {"bias": "0"}}, r"bias of shape \[6\] has no dimension '0'"),
        ("fsdp=3", {"shard": {"weight": -1}}, r"\[6, 8\] is not cut evenly along dimension 1"),
    ],
)
def test_what_fsdp_could_not_do_is_refused(mesh: str, words, said: str) -> None:
    """A pattern that nothing matches among it."""
    with pytest.raises(ValueError, match=said):
        simulate(torchlift.skeleton(nn.Linear, 8, 6), mesh, **words)


class Tied(nn.Module):
    """Ends that are one tensor, between them four layers, and a table that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.last = nn.Linear(4, 16, bias=False)
        self.last.weight = self.embed.weight
        self.register_buffer("rotary", torch.zeros(5), persistent=False)


def test_each_stage_with_a_name_of_a_tie_reads_it(tmp_path: Path) -> None:
    """The first and the last stage have a copy each; tables outside of layers are everywhere."""
    model = torchlift.skeleton(Tied)
    found = simulate(model, "pp=4")
    assert found.bytes == (80 + 256, 80, 80, 80 + 256)
    assert found.held == tuple(nbytes + 20 for nbytes in found.bytes)
    assert found.nbytes == 4 * 80 + 256
    torch.save(Tied().state_dict(), tmp_path / "tied.pt")
    alone = simulate(tmp_path / "tied.pt", "pp=4")
    assert (alone.bytes, alone.nbytes) == (found.bytes, found.nbytes)
    (file,) = alone.files.values()
    assert file[0] == sum(found.bytes)


def test_embeddings_belong_to_the_first_stage_in_any_order() -> None:
    """A safetensors file of GPT-2 has them after the layers, one of GPT-NeoX the head before."""
    gpt2 = ["h.0.w", "h.3.w", "ln_f.weight", "wpe.weight", "wte.weight"]
    assert stages(gpt2, 4) == [0, 3, 3, 0, 0]
    neox = ["embed_in.weight", "embed_out.weight", "final_layer_norm.bias", "layers.0.w"]
    assert stages(neox, 2) == [0, 1, 1, 0]
    llama = ["layers.0.w", "norm.weight", "output.weight", "tok_embeddings.weight"]
    assert stages(llama, 2) == [0, 1, 1, 0]
    assert stages(["embeddings.norm.weight", "layers.0.w", "layers.1.w"], 2) == [0, 0, 1]
