"""
GGUF to transformers: right names, wrong attention
==================================================

You have a ``.gguf`` of llama.cpp and a model of ``transformers``. You rename ``blk.0.attn_q`` to
``layers.0.self_attn.q_proj``, everything loads without an error, and the model talks nonsense. Why?

llama.cpp keeps the rows of q and k in another order. `torchlift.remap.from_to` undoes this and the
other differences of its files.
"""

# %%
# In short
# --------

import gguf
import transformers

import torchlift

sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
config = transformers.LlamaConfig(**sizes, vocab_size=256)
saved = transformers.LlamaForCausalLM(config).eval()
rename = torchlift.remap.from_to("gguf->transformers", saved)
name_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2).get_name
state = {name_of(k, [".weight"]): w for k, w in saved.state_dict().items()}
model = torchlift.skeleton(transformers.LlamaForCausalLM, config)
report = torchlift.load(model, state, rename=rename)
print(len(report.loaded), "tensors, such as", rename("blk.0.attn_q.weight"))

# %%
# The dict has the names of llama.cpp. Pass the path of your ``.gguf`` instead: its config and its
# tokenizer are in the file also, as you see below.
#
# Everything loads, and the logits are wrong
# ------------------------------------------
#
# Here is a real GGUF file. The ``gguf`` package writes it as llama.cpp's converter does:

# fold: How llama.cpp writes it
import tempfile

import torch

from torchlift import remap

Kind = gguf.GGMLQuantizationType
FACTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}


def rotated(rows, heads):
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(model, path, kind=Kind.F32):
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, name in FACTS.items():
        writer.add_uint32("llama." + key, getattr(config, name))
    words = [*map(chr, range(33, 127)), "he", "hey"]
    words += [f"<{number}>" for number in range(len(words), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["h e", "he y"])
    for name, tensor in model.state_dict().items():
        rows = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            rows = rotated(rows, config.num_attention_heads)
        stored = kind if rows.ndim > 1 else Kind.F32
        blocks = gguf.quants.quantize(rows, stored)
        name = name_of(name, [".weight"])
        writer.add_tensor(name, blocks, raw_dtype=stored)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


folder = tempfile.mkdtemp()
write(saved, folder + "/tiny.gguf")

# %%
# Here is the rule that everybody writes first: it changes only names. The load is strict, and
# nothing is missing.

by_names = remap.rules([
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.", "model.layers."),
    (r"\.attn_(q|k|v)\.", r".self_attn.\1_proj."),
    (r"\.attn_output\.", ".self_attn.o_proj."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.ffn_(gate|up|down)\.", r".mlp.\1_proj."),
])  # fmt: skip
words = torch.arange(16).view(1, -1)


def logits_by(rule):
    model = torchlift.skeleton(transformers.LlamaForCausalLM, saved.config)
    torchlift.load(model, folder + "/tiny.gguf", rename=rule)
    with torch.no_grad():
        return model.eval()(input_ids=words).logits


with torch.no_grad():
    expected = saved(input_ids=words).logits
print(
    "names alone, same logits:",
    torch.allclose(logits_by(by_names), expected, atol=1e-3),
)
print("from_to, same logits:", torch.equal(logits_by(rename), expected))

# %%
# Shapes are equal, so no check fails. The rotation of positions pairs two numbers of a head.
# llama.cpp pairs neighbours, and ``transformers`` pairs the first half with the second. So
# llama.cpp moves the rows of q and k, and of no other matrix.
#
# Config and tokenizer out of the file
# ------------------------------------
#
# You do not need another download, because the ``.gguf`` also contains the sizes of the model and
# its tokenizer. ``transformers`` reads both from it:

where = {"pretrained_model_name_or_path": folder, "gguf_file": "tiny.gguf"}
config = transformers.AutoConfig.from_pretrained(**where)
tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
model = torchlift.skeleton(
    transformers.AutoModelForCausalLM.from_config, config
)
rule = remap.from_to("gguf->transformers", model)
report = torchlift.load(model, folder + "/tiny.gguf", rename=rule)
print(len(report.loaded), "tensors,", tokenizer.tokenize("hey!"))

# %%
# Other differences in a GGUF file
# --------------------------------
#
# The differences depend on the model:
#
# - The norms of Gemma have one added.
# - The matrices of GPT-2 are transposed.
# - BLOOM has q, k and v in other groups.
# - Experts are in two tensors instead of one, and the head may be left out.
#
# `torchlift.remap.from_to` handles all of these. For an unknown model it raises an error. It
# refuses a file whose architecture or heads differ from the model's.
#
# Proof
# -----
#
# A quantised file, 80 MiB as numbers, is loaded in two new processes: by ``transformers`` itself
# and by `torchlift.load`. The latter computes the numbers in blocks, directly in their final place.

# fold: How it is measured
large = {
    **sizes,
    "hidden_size": 512,
    "intermediate_size": 4096,
    "vocab_size": 6144,
}
config = transformers.LlamaConfig(**large)
write(transformers.LlamaForCausalLM(config), folder + "/large.gguf", Kind.Q8_0)


def load_twice(way, folder):
    kind = transformers.LlamaForCausalLM
    for name in ("tiny.gguf", "large.gguf"):  # the first pays for imports
        torchlift.measure.mark(name)
        if way == "from_pretrained":
            model = kind.from_pretrained(folder, gguf_file=name)
        else:
            config = transformers.AutoConfig.from_pretrained(
                folder, gguf_file=name
            )
            model = torchlift.skeleton(kind, config)
            rule = remap.from_to("gguf->transformers", model)
            torchlift.load(model, f"{folder}/{name}", rename=rule)
    with torch.no_grad():
        return model.eval()(input_ids=words).logits


logits = []
for way in ("from_pretrained", "torchlift.load"):
    child = torchlift.measure.in_child(load_twice, way, folder)
    logits.append(child.value)
    start, timeline = child.memory.marks[1], child.memory.timeline
    peak = max(
        row.anonymous for row in timeline if row.seconds >= start.seconds
    )
    print(
        f"{way:<16} anonymous peak: {(peak - start.anonymous) / 2**20:.0f} MiB"
    )
assert torch.equal(*logits)
assert peak - start.anonymous < (80 + 64) * 2**20

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
rows = rotated(torch.arange(16).view(16, 1).numpy(), 1)[:, 0].tolist()
for at, to in enumerate(rows):
    look = {"color": "C0" if to < 8 else "C1", "hatch": "" if to < 8 else "//"}
    axes.bar((0, 1), 0.9, 0.2, (at, to), edgecolor="white", **look)
    axes.plot([0.1, 0.9], [at + 0.45, to + 0.45], "-", color=look["color"])
axes.set_xticks(
    [0, 1], ["the file\nof llama.cpp", "the model\nof transformers"]
)
axes.set(
    yticks=[0.45, 8.45, 15.45],
    yticklabels=[0, 8, 15],
    ylabel="row of one head of q",
)
axes.invert_yaxis()
plt.show()

# %%
# *The bars show the 16 rows of one head of q. Left, they have the order of the file: a row of the
# first half, then one of the second, hatched. Right, they have the order of the model. A line leads
# from each row's place in the file to its place in memory. If you rename only, every row but two
# lands in the wrong place.*
#
# Remember
# --------
#
# - A GGUF file is more than its model under other names. Rows, norms and experts differ by
#   architecture.
# - Equal shapes prove nothing. Compare logits.
# - ``AutoConfig`` and ``AutoTokenizer`` read a ``.gguf``, so the file is all that you need.
#
# Use this when
# -------------
#
# - **llama.cpp's file, transformers' model:** `torchlift.remap.from_to`. For a ``.pt`` of
#   openai-whisper, the migration guide has the rules.
# - **You want a safetensors file:** `torchlift.convert` with the same rule.
# - **The names are your own:** `torchlift.remap.rules`, and *Fused experts, split q, k, v*.

# %%
# Question
# --------
#
# A file in Q8_0 has eight bits a number. Are the loaded weights those that were written?

# fold: Answer to the question
# No. A block of 32 numbers shares a scale, so each is rounded to a step of it.
write(saved, folder + "/rounded.gguf", Kind.Q8_0)
rounded = torchlift.skeleton(transformers.LlamaForCausalLM, saved.config)
torchlift.load(rounded, folder + "/rounded.gguf", rename=rename)
off = (rounded.lm_head.weight - saved.lm_head.weight).abs().max().item()
largest = saved.lm_head.weight.abs().max().item()
print(f"off by at most ~{off / largest:.4f} of the largest weight")
assert 0 < off <= largest / 127
