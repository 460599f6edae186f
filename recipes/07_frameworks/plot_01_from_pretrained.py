"""
from_pretrained of any checkpoint: a DCP folder, a .pt, a URL, a tower of CLIP
==============================================================================

Your weights are in a DCP folder, in a ``.pt`` of your trainer, or behind a URL, and
``from_pretrained`` looks for ``model.safetensors``. Must you convert everything first?

No: ``from_pretrained`` takes a state dict, and `torchlift.open` is one, mapped from any format.
"""

# %%
# In short
# --------

import tempfile

import transformers as hf

import torchlift

config = hf.LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=512)
folder = tempfile.mkdtemp()
job = {"model": hf.LlamaForCausalLM(config), "step": 7}
torchlift.save(job, f"{folder}/job.pt")

hf.logging.disable_progress_bar()
ckpt = torchlift.open(f"{folder}/job.pt", root="model")
kind = hf.LlamaForCausalLM
model = kind.from_pretrained(None, config=config, state_dict=ckpt)
print(type(model).__name__, model.dtype, f"{model.num_parameters():,}")

# %%
# ``open`` reads the index and no weights. ``from_pretrained`` converts, ties and places the weights
# as usual. You can pass a URL or a folder instead of the path.
#
# Error no file named model.safetensors
# -------------------------------------
#
# ``from_pretrained`` cannot read the folder itself:

config.save_pretrained(folder)
try:
    hf.LlamaForCausalLM.from_pretrained(folder)
except OSError as error:
    print(type(error).__name__, str(error).replace(folder, "folder"), sep=": ")

# %%
# You could write your own loop over ``torch.load`` and ``load_state_dict``. It makes random weights
# first and reads the complete file in addition. It also misses the conversions of transformers for
# a mixture of experts. `torchlift.load` into a skeleton includes them and accounts for each name:

again = torchlift.skeleton(hf.LlamaForCausalLM, config)
rename = torchlift.remap.transformers(again)
torchlift.load(again, f"{folder}/job.pt", root="model", rename=rename)
assert torchlift.diff(again.state_dict(), model.state_dict()).equal

# %%
# A vision tower out of a CLIP checkpoint
# ---------------------------------------
#
# The file has two towers and two projections, and you need one tower. Its names begin with
# ``vision_model.``, but the names of the class do not:

small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
text = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1}
clip = hf.CLIPConfig(
    vision_config={**small, "num_attention_heads": 4, "image_size": 32},
    text_config={**small, "num_attention_heads": 4, **text},
)
whole = hf.CLIPModel(clip)
torchlift.save(whole.state_dict(), f"{folder}/clip.safetensors")

tower = torchlift.skeleton(hf.CLIPVisionModel, clip.vision_config)
try:
    torchlift.load(tower, f"{folder}/clip.safetensors")
except torchlift.MismatchError as error:
    print(
        type(error).__name__,
        str(error).split("\n")[0].replace(folder, ""),
        sep=": ",
    )

# %%
# The table of transformers knows the tower. Keys outside its prefix belong to other parts of the
# model and are skipped. A mismatch below the prefix is still an error:

rename = torchlift.remap.transformers(tower)
report = torchlift.load(tower, f"{folder}/clip.safetensors", rename=rename)
print(
    len(report.loaded),
    "of",
    len(torchlift.open(f"{folder}/clip.safetensors")),
    "tensors",
)
expected = whole.vision_model.state_dict()
assert torchlift.diff(tower.state_dict(), expected).equal

# %%
# Proof
# -----
#
# Each way loads a Llama of about 100 MB in a new process and computes one answer. The memory that
# it owns and the time of the load are printed. Only the second way needs a file of transformers.

# fold: How it is measured
import time

import torch

large = hf.LlamaConfig(
    hidden_size=512, intermediate_size=1536,
    num_hidden_layers=6, vocab_size=8000,
    num_attention_heads=8,
)  # fmt: skip
trained = hf.LlamaForCausalLM(large)
trained.save_pretrained(f"{folder}/hf")
torchlift.save({"model": trained.state_dict()}, f"{folder}/large.pt")
torchlift.save({"model": trained.state_dict()}, f"{folder}/dcp", format="dcp")


def torch_load():
    model = hf.LlamaForCausalLM(large)
    model.load_state_dict(torch.load(f"{folder}/large.pt")["model"])
    return model


def from_pretrained(path=None):
    if path is None:
        return hf.LlamaForCausalLM.from_pretrained(f"{folder}/hf")
    with torchlift.open(path, root="model") as ckpt:
        return hf.LlamaForCausalLM.from_pretrained(
            None, config=large, state_dict=ckpt
        )


def load_and_use(way, *path):
    hf.logging.disable_progress_bar()
    start = time.perf_counter()
    model = way(*path).eval()
    seconds = time.perf_counter() - start
    with torch.inference_mode():
        return seconds, model(torch.arange(16)[None]).logits.sum().item()


ways = {
    "torch.load, .pt": (torch_load,),
    "from_pretrained, its own files": (from_pretrained,),
    "from_pretrained, mapped .pt": (from_pretrained, f"{folder}/large.pt"),
    "from_pretrained, mapped DCP": (from_pretrained, f"{folder}/dcp"),
}
owned, answers, size = {}, set(), torchlift.open(f"{folder}/hf").nbytes / 2**20
for name, way in ways.items():
    child = torchlift.measure.in_child(load_and_use, *way)
    owned[name] = child.memory.added_anonymous / 2**20
    answers.add(child.value[1])
    print(
        f"{name:<31} {child.value[0]:.2f} s, "
        f"anonymous peak: {owned[name]:.0f} MiB"
    )
assert len(answers) == 1, "the same weights, to the bit"
assert owned["from_pretrained, mapped .pt"] < 0.5 * owned["torch.load, .pt"]

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.8))
labels = [name.replace(", ", ",\n") for name in owned]
bars = axes.barh(labels, list(owned.values()), color=["C0", "C3", "C1", "C2"])
axes.bar_label(bars, [f"{peak:.0f} MiB" for peak in owned.values()], padding=4)
axes.axvline(size, color="black", linewidth=1, linestyle=":")
axes.invert_yaxis()
axes.set(
    xlim=(0, 1.25 * max(owned.values())),
    xlabel="peak of anonymous memory (MiB)",
)
plt.show()

# %%
# *The bars show the most memory that a process owns while it loads a Llama and computes one answer.
# The dotted line is the size of its weights. Over a mapped checkpoint of any format,
# from_pretrained owns little more than the computation needs, so you do not have to convert first.*
#
# Remember
# --------
#
# - ``from_pretrained(None, config=config, state_dict=torchlift.open(path))``: any format, mapped.
# - ``root`` selects the model inside the file. ``dtype`` and the other arguments are those of
#   transformers.
# - With `torchlift.remap.transformers` a class that is a part of a model loads its part of the
#   file.
#
# Use this when
# -------------
#
# - **The class is one of transformers', the file is not:** the line of this page.
# - **Names must be accounted for, or you need a device map:** `torchlift.skeleton` and
#   `torchlift.load` with ``rename``, as in *Load a transformers model from safetensors without
#   from_pretrained*.
# - **The file goes to others:** `torchlift.convert` writes it once as safetensors.

# %%
# Question
# --------
#
# You pass ``dtype=torch.bfloat16`` too. Which weights does the model have?

# fold: Answer to the question
# Those of the file, rounded once. They are its own now, and not mapped.
half = kind.from_pretrained(
    None, config=config, state_dict=ckpt, dtype=torch.bfloat16
)
assert torch.equal(half.lm_head.weight, ckpt["lm_head.weight"].bfloat16())
print(half.dtype, "- equal to a cast of the file")
