"""Which tensors are the scales of which codes, in the files of many libraries."""

from __future__ import annotations

import pytest
import torch

from torchlift.formats.scales import find_quantised

DTYPES = {
    "f8": torch.float8_e4m3fn, "i8": torch.int8, "u8": torch.uint8, "i32": torch.int32,
    "i64": torch.int64, "u32": torch.uint32, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32,
}  # fmt: skip


def tensors(text: str) -> dict[str, torch.Tensor]:
    """Tensors without values: "l.weight f8 256x384, l.scale f32 2x3, ..."."""
    found = {}
    for line in text.split(","):
        key, dtype, *sizes = line.split()
        shape = [int(size) for size in sizes[0].split("x")] if sizes else []
        found[key] = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    return found


#: Library -> its tensors, and the scales of each tensor of codes.
FILES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "DeepSeek": (
        "l.weight f8 256x384, l.weight_scale_inv f32 2x3",
        {"l.weight": ("l.weight_scale_inv",)}),
    "DeepSeek's own code": (
        "l.weight f8 256x384, l.scale f32 2x3", {"l.weight": ("l.scale",)}),
    "compressed-tensors": (
        "l.weight i8 4x8, l.weight_scale bf16 4x1, l.weight_zero_point i8 4x1,"
        "m.weight_packed i32 4x8, m.weight_scale f32 4x2, l.input_scale f32 1",
        {"l.weight": ("l.weight_scale",), "m.weight_packed": ("m.weight_scale",)}),
    "bitsandbytes int8": (
        "l.weight i8 4x8, l.SCB f32 4, l.weight_format u8", {"l.weight": ("l.SCB",)}),
    "bitsandbytes nf4": (
        "l.weight u8 512x1, l.weight.absmax u8 16, l.weight.quant_map f32 16,"
        "l.weight.nested_absmax f32 1",
        {"l.weight": ("l.weight.absmax",)}),
    "GPTQ and AWQ": (
        "l.qweight i32 8x16, l.qzeros i32 2x2, l.scales f16 2x16, l.g_idx i32 64",
        {"l.qweight": ("l.scales",)}),
    "torchao": (
        "l._weight_qdata i8 4x8, l._weight_scale f32 4",
        {"l._weight_qdata": ("l._weight_scale",)}),
    "quanto": (
        "l.weight._data i8 4x8, l.weight._scale f32 4x1",
        {"l.weight._data": ("l.weight._scale",)}),
    "gpt-oss": (
        "e.up_blocks u8 4x8x16, e.up_scales u8 4x8", {"e.up_blocks": ("e.up_scales",)}),
    "nvfp4": (
        "l.weight u8 8x64, l.weight_scale f8 8x8, l.weight_scale_2 f32",
        {"l.weight": ("l.weight_scale", "l.weight_scale_2"),
         "l.weight_scale": ("l.weight_scale_2",)}),
    "MLX, at the top": (
        "weight u32 8x16, scales f32 8x2, biases f32 8x2", {"weight": ("scales",)}),
    "a scale of something else, or a parameter that has the word": (
        "l.weight f8 4x8, l.input_scale f32, l.upscale f32, n.weight f32 8, n.weight_scale f32,"
        "n.scale f32 8, a.relative_index i32 64, a.scale f32 1, a.logit_scale f32 1, s.mask u8 4,"
        "s.scale.weight f32 1, other.weight_scale f32 1", {}),
    "of one dimension, or whole numbers": (
        "t.weight i8 4, t.weight_scale f32 4, u.weight i8 8, u.scales i64 1", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_scales_are_found_by_name_dtype_and_shape(name: str) -> None:
    """One rule for the files of all these libraries."""
    text, expected = FILES[name]
    assert find_quantised(tensors(text)).scales == expected
