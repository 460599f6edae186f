"""Each format keeps the contract: files by the library that owns it, where there is one."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import gguf_writer
from contract import ODD, Contract, State, values
from huggingface_hub import save_torch_state_dict
from rank_files import Era
from safetensors.torch import load_file, save_file
from zero_files import Zero

_TORCH = {"torch_pickle", "torch_zip", "zip_archive"}
_FOLDER = {"folders", "ranks", "safetensors", "sharded"}


class TestTorchZip(Contract):
    """``torch.save``."""

    format = "torch-zip"
    readers = _TORCH
    has_sums = has_views = written = True

    def write(self, folder: Path, state: State) -> None:
        torch.save(state, folder / "x")

    def read(self, folder: Path) -> State:
        return torch.load(folder / "x")


class TestTorchLegacy(Contract):
    """``torch.save`` before torch 1.6."""

    format = "torch-legacy"
    readers = _TORCH | {"torch_legacy"}
    has_views = True

    def write(self, folder: Path, state: State) -> None:
        torch.save(state, folder / "x", _use_new_zipfile_serialization=False)

    def read(self, folder: Path) -> State:
        return torch.load(folder / "x")


class TestTorchScript(Contract):
    """``torch.jit.save``."""

    format = "torchscript"
    readers = _TORCH | {"torchscript"}
    has_sums = has_views = True
    odd: ClassVar[list[str]] = ["\u00fc"]

    def write(self, folder: Path, state: State) -> None:
        model = torch.nn.Module()
        for key, value in state.items():
            name, _, last = key.rpartition(".")
            if name and not hasattr(model, name):
                model.add_module(name, torch.nn.Module())
            model.get_submodule(name).register_buffer(last, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated
            torch.jit.script(model).save(folder / "x")

    def read(self, folder: Path) -> State:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(torch.jit.load(folder / "x").state_dict())


class TestSafetensors(Contract):
    """``safetensors.torch.save_file``."""

    format = "safetensors"
    readers: ClassVar[set[str]] = {"safetensors"}
    written = True

    def write(self, folder: Path, state: State) -> None:
        save_file(state, folder / "x")

    def read(self, folder: Path) -> State:
        return load_file(folder / "x")


class TestSharded(Contract):
    """Shards of Hugging Face, with their index."""

    format = "sharded"
    opened = "model.safetensors.index.json"
    readers: ClassVar[set[str]] = {"safetensors", "sharded"}
    written = True

    def write(self, folder: Path, state: State) -> None:
        save_torch_state_dict(state, folder, max_shard_size=20)

    def read(self, folder: Path) -> State:
        names = json.loads((folder / self.opened).read_text())["weight_map"].values()
        return {key: value for name in names for key, value in load_file(folder / name).items()}


class TestDcp(Contract):
    """``torch.distributed.checkpoint.save``."""

    format = "dcp"
    opened = ""
    readers = _TORCH | _FOLDER | {"dcp"}
    has_sums = written = True

    def write(self, folder: Path, state: State) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.save(state, checkpoint_id=folder, no_dist=True)

    def read(self, folder: Path) -> State:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            found = {key: torch.empty(m.size, dtype=m.properties.dtype) for key, m in known.items()}
            dcp.load(found, checkpoint_id=folder, no_dist=True)
        return found


class TestGguf(Contract):
    """``gguf.GGUFWriter``."""

    format = "gguf"
    readers: ClassVar[set[str]] = {"gguf", "sharded"}
    is_padded = True
    odd: ClassVar[list[str]] = [name for name in ODD if len(name) < 64]

    def state(self) -> State:
        kept = ("a.weight", "a.bias", "b.steps")
        return {key: value for key, value in values().items() if key in kept}

    def write(self, folder: Path, state: State) -> None:
        with gguf_writer(folder / "x") as writer:
            for key, value in state.items():
                writer.add_tensor(key, value.numpy())

    def read(self, folder: Path) -> State:
        tensors = gguf.GGUFReader(folder / "x").tensors
        return {t.name: torch.from_numpy(np.array(t.data)) for t in tensors}


class TestNpz(Contract):
    """``numpy.savez``."""

    format = "npz"
    readers: ClassVar[set[str]] = {"npz", "zip_archive"}
    has_sums = True
    odd: ClassVar[list[str]] = [name for name in ODD if name != ".."]

    def state(self) -> State:
        return {key: v for key, v in values().items() if v.dtype != torch.bfloat16}

    def write(self, folder: Path, state: State) -> None:
        with (folder / "x").open("wb") as file:
            np.savez(file, **{key: value.numpy() for key, value in state.items()})

    def read(self, folder: Path) -> State:
        with np.load(folder / "x") as arrays:
            return {key: torch.from_numpy(arrays[key]) for key in arrays}


class TestZero(Contract):
    """DeepSpeed's ZeRO on three ranks."""

    format = "zero"
    opened = ""
    readers = _TORCH | _FOLDER | {"zero"}
    has_sums = True
    exclude: ClassVar[list[str]] = ["optimizer"]
    stage = 2

    def state(self) -> State:
        return {key: v for key, v in values().items() if v.dtype == torch.float32}

    def write(self, folder: Path, state: State) -> None:
        made = Zero(self.stage, 3, [state]).write(folder / "made")
        for file in made.iterdir():
            shutil.move(file, folder / file.name)
        shutil.rmtree(folder / "made")
        torch.save(state, folder.with_name(f"{folder.name}.theirs"))

    def read(self, folder: Path) -> State:
        return torch.load(folder.with_name(f"{folder.name}.theirs"))


class TestZero3(TestZero):
    """ZeRO of stage 3, which cuts each parameter."""

    stage = 3


class TestFsdp(TestZero):
    """The files of two ranks of FSDP, by rows."""

    format = "sharded"
    readers = _TORCH | _FOLDER
    exclude: ClassVar[list[str]] = []

    def state(self) -> State:
        return values()

    def write(self, folder: Path, state: State) -> None:
        era, files = Era(), list[State]()
        for rank in range(2):
            files.append({})
            for key, whole in state.items():
                placed = [era.placed("Shard", dim=0) if whole.dim() else era.placed("Replicate")]
                parts = whole.chunk(2) if whole.dim() else [whole] * 2
                local = parts[rank] if rank < len(parts) else whole[:0]
                files[rank][key] = era.dtensor(local.clone(), whole.shape, placed, [2], [rank])
        for rank, made in enumerate(files):
            era.save(folder / f"model_world_size_2_rank_{rank}.pt", made)
        torch.save(state, folder.with_name(f"{folder.name}.theirs"))


class TestSlices(TestFsdp):
    """Slices of safetensors, as torch's ``HuggingFaceStorageWriter`` writes them."""

    readers = _FOLDER
    has_sums = False

    def write(self, folder: Path, state: State) -> None:
        for rank in range(2):
            local, starts = State(), dict[str, object]()
            for key, whole in state.items():
                parts = whole.chunk(2) if whole.dim() else [whole]
                if rank < len(parts):
                    local[key] = parts[rank].clone()
                    first = [rank * len(parts[0]), *[0] * (whole.dim() - 1)] if whole.dim() else []
                    starts[key] = {"saved_offsets": first}
            name = f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
            save_file(local, folder / name, {"DCP_SHARDING_INFO": json.dumps(starts)})
        torch.save(state, folder.with_name(f"{folder.name}.theirs"))
