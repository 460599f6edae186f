"""diffusers' pipelines: folders of components, with variants and shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import same

import torchlift

pytest.importorskip("diffusers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from diffusers import AutoencoderKL, DDIMPipeline, DDIMScheduler, UNet2DModel

UNET = {
    "sample_size": 8, "in_channels": 2, "out_channels": 2, "layers_per_block": 1,
    "block_out_channels": (8, 16), "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4,
}  # fmt: skip
VAE = {"block_out_channels": (8,), "latent_channels": 2, "norm_num_groups": 4, "sample_size": 8}


def unet() -> Any:
    return UNet2DModel(**UNET)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline's folder; its model is there in two variants, the plain one in shards."""
    torch.manual_seed(0)
    folder = tmp_path / "pipeline"
    DDIMPipeline(unet(), DDIMScheduler()).save_pretrained(folder)
    unet().save_pretrained(folder / "unet", variant="fp16")
    AutoencoderKL(**VAE).save_pretrained(folder / "vae")
    return folder


@pytest.mark.parametrize("make", [unet, lambda: torchlift.skeleton(unet)])
def test_a_component_loads_from_its_folder(make: Any, pipeline: Path) -> None:
    """As from_pretrained of the class, and computes the same."""
    expected = UNet2DModel.from_pretrained(pipeline, subfolder="unet")
    model = make().eval()
    torchlift.load(model, pipeline / "unet")
    assert same(model, expected)
    noise = torch.linspace(-1, 1, 128).view(1, 2, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(noise, 3).sample, expected(noise, 3).sample)
    other = UNet2DModel.from_pretrained(pipeline, subfolder="unet", variant="fp16")
    torchlift.load(model, pipeline / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    assert same(model, other)


def test_a_whole_pipeline_names_its_components(pipeline: Path) -> None:
    """Each is a checkpoint of its own, and loads as one."""
    with pytest.raises(torchlift.FormatError, match=r"found unet, vae"):
        torchlift.open(pipeline)
    model = torchlift.skeleton(AutoencoderKL, **VAE)
    torchlift.load(model, pipeline / "vae")
    assert same(model, AutoencoderKL.from_pretrained(pipeline / "vae"))
