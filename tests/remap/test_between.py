"""`remap.from_to`: what transformers itself reads of GGUF."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from gguf_files import MODELS, finish, small_model, write_gguf
from torch import nn
from zoo import same

import torchlift
from torchlift import measure, remap
from torchlift.errors import FormatError, MismatchError


def loaded(model: Any, path: Path, **words: Any) -> Any:
    """A model of the same configuration, with the values of a file."""
    made = torchlift.skeleton(type(model), model.config)
    rule = remap.from_to("gguf->transformers", model.config)
    torchlift.load(made, path, rename=rule, **words)
    return made.eval()


def reference(model: Any, path: Path) -> Any:
    """The same as transformers reads it, in its own way."""
    words: Any = {} if isinstance(model, hf.MistralForCausalLM) else {"config": model.config}
    words["dtype"] = torch.float32
    return type(model).from_pretrained(path.parent, gguf_file=path.name, **words)


# ---- GGUF, against transformers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in MODELS for kind in ("F32", "Q8_0")),
        *(("LlamaForCausalLM", kind) for kind in ("F16", "BF16", "Q4_0", "Q5_1")),
    ],
)
def test_every_architecture_is_what_transformers_reads(tmp_path, name, kind):
    """To the bit, of floats and of blocks, and nothing is left over. By `convert`, too."""
    model = small_model(name)
    path = write_gguf(model, tmp_path / "m.gguf", kind=kind)
    rule = remap.from_to("gguf->transformers", model.config)
    torchlift.convert(path, tmp_path / "here.safetensors", rename=rule)
    again = torchlift.skeleton(type(model), model.config)
    torchlift.load(again, tmp_path / "here.safetensors")
    assert same(again, loaded(model, path))
    found, expected = loaded(model, path).state_dict(), reference(model, path).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        tensor = tensor.to(found[key].dtype)  # transformers makes all of it float32
        if key.endswith("A_log"):  # by numpy's logarithm there, which is torch's but for a bit
            assert torch.allclose(found[key], tensor, rtol=1e-6), key
        else:
            assert same(found[key], tensor), key


def test_the_error_for_a_gguf_file_names_the_rename_that_loads_it(tmp_path):
    """The rename of transformers' own files would end in the same error."""
    model = small_model("LlamaForCausalLM")
    path = write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(MismatchError) as caught:
        torchlift.load(small_model("LlamaForCausalLM"), path)
    assert caught.value.hint == (
        "The names are those of a GGUF file: "
        'pass rename=remap.from_to("gguf->transformers", model).'
    )
    other = torchlift.skeleton(type(model), model.config)
    torchlift.load(other, path, rename=remap.from_to("gguf->transformers", other))
    assert same(other, model)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (  # transformers 5.23 leaves the rows where they are
            "FalconForCausalLM",
            {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": True},
        ),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["groups", "biases"],
)
def test_heads_are_ordered_as_llama_cpp_takes_them_apart(tmp_path, name, changes):
    """Of Falcon 40B, which has them in groups, and of LLaMA with biases, as InternLM has them."""
    model = small_model(name, **changes)
    path = write_gguf(model, tmp_path / "m.gguf")
    assert same(loaded(model, path), model)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_without_a_head_has_its_embeddings_as_one(tmp_path, kind):
    """llama.cpp computes so, whether a configuration says that they are tied or not."""
    for tied in (True, False):
        model = small_model("LlamaForCausalLM", tie_word_embeddings=True)
        path = write_gguf(model, tmp_path / f"{tied}.gguf", kind=kind)
        model.config.tie_word_embeddings = tied
        made = loaded(model, path)
        assert same(made.lm_head.weight, made.model.embed_tokens.weight)
        assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied


def test_a_head_is_not_tied_to_embeddings_that_differ(tmp_path):
    """What is one tensor in the model and two in the file is refused; equal ones are one."""
    model = small_model("LlamaForCausalLM", tie_word_embeddings=True)
    path = write_gguf(model, tmp_path / "m.gguf", head=True)
    assert same(loaded(model, path).lm_head.weight, model.lm_head.weight)
    model.lm_head.weight = nn.Parameter(torch.ones(96, 64))
    path = write_gguf(model, tmp_path / "m.gguf", head=True)
    model.tie_weights()
    with pytest.raises(MismatchError, match="ties two keys that have different values"):
        loaded(model, path)


# ---- blocks


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_blocks_stay_blocks_where_a_module_holds_them(tmp_path, kind):
    """transformers' ``GgufLinear`` has as many bytes: the same ones, with the rows of q and k."""
    from transformers.integrations.gguf.utils import GgufLinear

    model = small_model("LlamaForCausalLM")
    path = write_gguf(model, tmp_path / "m.gguf", kind=kind)
    rule = remap.from_to("gguf->transformers", model)

    def packed() -> Any:
        made = type(model)(model.config)
        for name, module in list(made.named_modules()):
            if type(module) is nn.Linear:
                sizes = module.in_features, module.out_features
                made.set_submodule(name, GgufLinear(*sizes, int(Kind[kind])))
        return made

    made = torchlift.skeleton(packed)
    report = torchlift.load(made, path, rename=rule)
    plain = loaded(model, path).state_dict()
    for name, module in made.named_modules():
        if isinstance(module, GgufLinear):
            assert module.weight.dtype is torch.uint8
            values = quants.dequantize(module.weight.numpy(), Kind[kind])
            assert same(torch.from_numpy(values), plain[f"{name}.weight"]), name
    assert report.loaded["model.layers.0.mlp.up_proj.weight"].route == "view"


def _heavy(folder: Path) -> Path:
    """Four matrices of 4096 x 4096 in blocks, and little else."""
    rows = np.random.default_rng(0).standard_normal((256, 4096), dtype=np.float32)
    writer = gguf.GGUFWriter(folder / "heavy.gguf", "llama")
    blocks = quants.quantize(rows, Kind.Q8_0)
    for name in "q", "k", "v", "output":
        writer.add_tensor(
            f"blk.0.attn_{name}.weight", np.tile(blocks, (16, 1)), raw_dtype=Kind.Q8_0
        )
    finish(writer)
    return folder / "heavy.gguf"


def _load_and_convert(path: Path) -> None:
    config = hf.LlamaConfig(
        hidden_size=4096, intermediate_size=8, num_hidden_layers=1, num_attention_heads=32,
        vocab_size=8, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = torchlift.skeleton(hf.LlamaForCausalLM, config)
    rule = remap.from_to("gguf->transformers", config)
    device = remap.by_pattern({"self_attn": "cpu", "": "meta"})
    measure.mark("ready")
    torchlift.load(
        model, path, rename=rule, dtype="bfloat16", device=device, allow_missing=["*"],
    )  # fmt: skip
    measure.mark("loaded")
    torchlift.convert(path, path.with_suffix(".safetensors"), rename=rule)


def test_blocks_become_numbers_some_at_a_time(tmp_path):
    """What stays, and no matrix twice: one alone would be 64 MiB of float32."""
    use = measure.in_child(_load_and_convert, _heavy(tmp_path)).memory
    ready, loaded = use.marks
    for start, end, owned in ((ready, loaded.seconds, 128), (loaded, use.seconds, 0)):
        rows = [row for row in use.timeline if start.seconds <= row.seconds <= end]
        peak = (max(row.anonymous for row in rows) - start.anonymous) / 2**20
        assert owned < peak + 1 < owned + 64


# ---- openai-whisper


def test_the_table_for_whisper_names_every_tensor():
    """The rules of the migration guide, for all names of a model of openai-whisper."""
    page = Path(__file__).parents[2].joinpath("docs", "guide", "migration.rst").read_text("utf-8")
    start = page.index("   whisper = remap.rules([")
    named: dict[str, Any] = {"remap": remap}
    exec(dedent(page[start : page.index("\n   ])", start) + len("\n   ])")]), named)
    theirs = {"decoder.token_embedding.weight", "decoder.mask"}
    for part, ends, attentions in (
        ("encoder", ("conv1", "conv2", "ln_post"), ("attn",)),
        ("decoder", ("ln",), ("attn", "cross_attn")),
    ):
        names = [*("mlp.0", "mlp.2", "mlp_ln"), *(f"{name}_ln" for name in attentions)]
        names += [f"{name}.{each}" for name in attentions for each in ("query", "value", "out")]
        names = [*ends, *(f"blocks.{n}.{name}" for n in range(2) for name in names)]
        theirs |= {f"{part}.{name}.{kind}" for name in names for kind in ("weight", "bias")}
        theirs |= {f"{part}.blocks.{n}.{name}.key.weight" for n in range(2) for name in attentions}
        theirs.add(f"{part}.positional_embedding")
    config = hf.WhisperConfig(d_model=24, encoder_layers=2, decoder_layers=2)
    ours = torchlift.skeleton(hf.WhisperForConditionalGeneration, config).state_dict()
    found = [named["whisper"](name) for name in theirs]
    assert sorted(filter(None, found)) == sorted(ours.keys() - {"proj_out.weight"})


# ---- the rule as a value


def test_the_rule_is_a_plain_value():
    """It prints as its call, is equal to itself, and can be pickled."""
    model = small_model("LlamaForCausalLM")
    rule = remap.from_to("gguf->transformers", model)
    assert repr(rule) == "from_to('gguf->transformers', LlamaForCausalLM)"
    assert rule == remap.from_to("gguf->transformers", model.config)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule("rope_freqs.weight") is None
    assert rule("adapter.weight") == "adapter.weight"


def test_the_rule_composes_with_others(tmp_path):
    """With a prefix before it and behind it; what it checks of a file is checked all the same."""
    model = small_model("LlamaForCausalLM")
    path = write_gguf(model, tmp_path / "m.gguf")
    rule = remap.from_to("gguf->transformers", model)
    behind = rule | remap.rules([(r"^", "inner.")])
    made = nn.ModuleDict({"inner": torchlift.skeleton(type(model), model.config)})
    torchlift.load(made, path, rename=behind)
    assert same(made["inner"], model)
    other = small_model("Qwen2ForCausalLM")
    wrong = remap.from_to("gguf->transformers", other) | remap.strip("x")
    with pytest.raises(MismatchError, match="describe different models"):
        torchlift.load(other, path, rename=wrong)


# ---- what does not fit


def test_a_file_of_another_model_is_refused(tmp_path):
    """By its architecture, or by heads that no shape tells of, in a load and a conversion."""
    llama, qwen = small_model("LlamaForCausalLM"), small_model("Qwen2ForCausalLM")
    path = write_gguf(llama, tmp_path / "m.gguf")
    more = small_model("LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=4)
    for model, found in (
        (qwen, "general.architecture.*expected qwen2 for Qwen2ForCausalLM; found llama"),
        (more, "attention.head_count.*expected 8 for LlamaForCausalLM; found 4"),
    ):
        rule = remap.from_to("gguf->transformers", model)
        with torchlift.open(path) as opened:
            for source in (path, [path], opened, [path, {"more": torch.ones(1)}]):
                with pytest.raises(MismatchError, match=found):
                    torchlift.load(model, source, rename=rule)
        with pytest.raises(MismatchError, match=found):
            torchlift.convert(path, tmp_path / "n.safetensors", rename=rule)
    assert not (tmp_path / "n.safetensors").exists()


def test_rows_that_do_not_divide_into_heads_are_refused():
    """The configuration is not that of the tensors."""
    model = small_model("LlamaForCausalLM")
    rule = remap.from_to("gguf->transformers", model)
    with pytest.raises(
        MismatchError, match=r"'blk.0.attn_q.weight': the tensor does not match .*shape \[30, 64\]"
    ):
        torchlift.load(model, {"blk.0.attn_q.weight": torch.ones(30, 64)}, rename=rule)
    whole = torch.ones(64, 64, dtype=torch.int8)
    norms = remap.from_to("gguf->transformers", small_model("Gemma2ForCausalLM"))
    with pytest.raises(MismatchError, match="is stored as int8, which cannot be computed with"):
        torchlift.load(model, {"output_norm.weight": whole}, rename=norms)


def test_blocks_that_would_be_cut_are_refused(tmp_path):
    """Columns of Qwen3.5's value heads are fewer than a block of Q6_K has numbers."""
    model = small_model("Qwen3_5ForCausalLM", linear_value_head_dim=16)
    path = write_gguf(model, tmp_path / "m.gguf", kind="Q8_0")
    with pytest.raises(FormatError, match=r"ssm_out.*would cut blocks"):
        loaded(model, path)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("gguf", None, "expected 'gguf->transformers'"),
        ("transformers->gguf", None, "llama.cpp's convert_hf_to_gguf.py"),
        ("whisper->transformers", None, "Use remap.rules for other names"),
        ("transformers->whisper", None, "Use remap.rules for other names"),
        ("gguf->transformers", hf.BertConfig(architectures=["BertModel"]), "files of 'bert'"),
    ],
)
def test_what_there_is_no_rule_for_is_said(kind, config, message):
    """With what there is."""
    with pytest.raises(ValueError, match=message):
        remap.from_to(kind, config)


def test_without_the_package_there_are_no_names(monkeypatch):
    """And the error says which one, and how to get it."""
    model = small_model("LlamaForCausalLM")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        remap.from_to("gguf->transformers", model)


def test_experts_may_be_fused_in_the_file(tmp_path):
    """As llama.cpp's converter writes them on request."""
    model = small_model("Qwen3MoeForCausalLM")
    path = write_gguf(model, tmp_path / "m.gguf")
    fuse = remap.merge(["*_gate_exps.*", "*_up_exps.*"], "*_gate_up_exps.*", cat=1)
    torchlift.convert(path, tmp_path / "f.safetensors", rename=fuse)
    rule = remap.from_to("gguf->transformers", model)
    made = torchlift.skeleton(type(model), model.config)
    torchlift.load(made, tmp_path / "f.safetensors", rename=rule)
    assert same(made, model)


def test_half_of_the_experts_are_not_all(tmp_path):
    """Gate and up projection make one tensor, or none."""
    model = small_model("Qwen3MoeForCausalLM")
    path = write_gguf(model, tmp_path / "m.gguf")
    rule = remap.from_to("gguf->transformers", model)
    with pytest.raises(MismatchError, match=r"Missing: blk.1.ffn_up_exps.weight"):
        torchlift.load(model, path, rename=rule, exclude=["blk.1.ffn_up_exps*"], strict=False)
