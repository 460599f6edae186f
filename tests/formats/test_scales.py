"""Which tensors are the scales of which codes, in the files of many libraries."""

from __future__ import annotations

import pytest
import torch

from torchlift.formats.scales import find_quantised

F8, I8, U8, I32, F32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.float32


def tensors(**kinds: tuple[torch.dtype, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors without values by key. Two underscores stand for a dot."""
    return {
        key.replace("__", "."): torch.empty(shape, dtype=dtype, device="meta")
        for key, (dtype, shape) in kinds.items()
    }


FILES = {
    "DeepSeek": (
        tensors(l__weight=(F8, (256, 384)), l__weight_scale_inv=(F32, (2, 3))),
        {"l.weight": ("l.weight_scale_inv",)},
    ),
    "DeepSeek's own code": (
        tensors(l__weight=(F8, (256, 384)), l__scale=(F32, (2, 3))),
        {"l.weight": ("l.scale",)},
    ),
    "compressed-tensors": (
        tensors(
            l__weight=(I8, (4, 8)), l__weight_scale=(torch.bfloat16, (4, 1)),
            l__weight_zero_point=(I8, (4, 1)), m__weight_packed=(I32, (4, 8)),
            m__weight_scale=(F32, (4, 2)), l__input_scale=(F32, (1,)),
        ),
        {"l.weight": ("l.weight_scale",), "m.weight_packed": ("m.weight_scale",)},
    ),
    "bitsandbytes int8": (
        tensors(l__weight=(I8, (4, 8)), l__SCB=(F32, (4,)), l__weight_format=(U8, ())),
        {"l.weight": ("l.SCB",)},
    ),
    "bitsandbytes nf4": (
        tensors(
            l__weight=(U8, (512, 1)), l__weight__absmax=(U8, (16,)),
            l__weight__quant_map=(F32, (16,)), l__weight__nested_absmax=(F32, (1,)),
        ),
        {"l.weight": ("l.weight.absmax",)},
    ),
    "GPTQ and AWQ": (
        tensors(
            l__qweight=(I32, (8, 16)), l__qzeros=(I32, (2, 2)),
            l__scales=(torch.float16, (2, 16)), l__g_idx=(I32, (64,)),
        ),
        {"l.qweight": ("l.scales",)},
    ),
    "torchao": (
        tensors(l___weight_qdata=(I8, (4, 8)), l___weight_scale=(F32, (4,))),
        {"l._weight_qdata": ("l._weight_scale",)},
    ),
    "quanto": (
        tensors(l__weight___data=(I8, (4, 8)), l__weight___scale=(F32, (4, 1))),
        {"l.weight._data": ("l.weight._scale",)},
    ),
    "gpt-oss": (
        tensors(e__up_blocks=(U8, (4, 8, 16)), e__up_scales=(U8, (4, 8))),
        {"e.up_blocks": ("e.up_scales",)},
    ),
    "nvfp4": (
        tensors(l__weight=(U8, (8, 64)), l__weight_scale=(F8, (8, 8)), l__weight_scale_2=(F32, ())),
        {
            "l.weight": ("l.weight_scale", "l.weight_scale_2"),
            "l.weight_scale": ("l.weight_scale_2",),
        },
    ),
    "MLX, at the top": (
        tensors(weight=(torch.uint32, (8, 16)), scales=(F32, (8, 2)), biases=(F32, (8, 2))),
        {"weight": ("scales",)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_scales_are_found_by_name_dtype_and_shape(name: str) -> None:
    """One rule for the files of all these libraries."""
    found, expected = FILES[name]
    assert find_quantised(found).scales == expected


def test_other_tensors_are_not_taken_for_scales() -> None:
    """A scale of something else, a parameter that has the word, or codes without a scale."""
    assert not find_quantised(
        tensors(
            l__weight=(F8, (4, 8)),
            l__input_scale=(F32, ()),
            l__upscale=(F32, ()),
            n__weight=(F32, (8,)),
            n__weight_scale=(F32, ()),
            n__scale=(F32, (8,)),
            a__relative_index=(I32, (64,)),
            a__scale=(F32, (1,)),
            a__logit_scale=(F32, (1,)),
            s__mask=(U8, (4,)),
            s__scale__weight=(F32, (1,)),
            other__weight_scale=(F32, (1,)),
            t__weight=(I8, (4,)),
            t__weight_scale=(F32, (4,)),
            u__weight=(I8, (8,)),
            u__scales=(torch.int64, (1,)),
        )
    ).scales
