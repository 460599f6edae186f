"""Find the scales of quantised tensors: without its scale, the values of such a tensor are wrong.

A quantised tensor holds codes, which are small integers or 8-bit floats. Another tensor next to it
holds one scale for the tensor, a row, a group or a block. Its name contains a word for a scale. The
rest of it is the name of the codes or of their module. Examples are ``weight_scale_inv`` and
``weight.absmax`` next to ``weight``, and ``scales`` next to ``qweight``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from torchlift._system.text import clipped_list
from torchlift.errors import Argument, Hint, PlacementError

#: dtypes of codes besides 8-bit floats. Codes of few bits are packed into the wider ones.
_CODES = frozenset({"int8", "uint8", "int32", "uint32", "float4_e2m1fn_x2"})
#: What is before the word for a scale in a key. It ends where the word's own part begins.
_SCALE = re.compile(r"(.*[._:]|)(?:scales?|absmax|SCB)(?:[\d_:][^.]*)?", re.DOTALL)
#: Names of quantised integers whose scale has no more than the word in its name. Other modules
#: have integers next to a parameter that is called ``scale``.
_WEIGHT = re.compile(r"weight|(?:^|_)w\d*(?:_|$)", re.IGNORECASE)


class _Tensor(Protocol):
    """A tensor, or its entry."""

    @property
    def dtype(self) -> object:
        """The dtype, or its name."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes in elements."""


@dataclass(frozen=True)
class Quantised:
    """The quantised tensors of a checkpoint.

    Attributes:
        scales: Key of a quantised tensor -> keys of its scales.
    """

    scales: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def of_scales(self) -> frozenset[str]:
        """Keys of all scales."""
        return frozenset(key for keys in self.scales.values() for key in keys)

    def renamed(self, keys: Mapping[str, Sequence[str]]) -> Quantised:
        """Return the quantised tensors under other names.

        Args:
            keys: New name -> the keys of the tensors that it is made of.
        """
        names: dict[str, list[str]] = {}
        for name, sources in keys.items() if self.scales else ():
            for key in sources:
                names.setdefault(key, []).append(name)
        scales = {
            name: tuple(new for key in found for new in names.get(key, [key]))
            for codes, found in self.scales.items()
            for name in names.get(codes, ())
        }
        return Quantised(scales)

    def needs_scale(self, key: str, dtype: object) -> bool:
        """Return whether a tensor of this key and dtype holds codes, not values."""
        return key in self.scales and is_code(dtype)

    def cast_error(self, key: str, dtype: object, path: str) -> PlacementError:
        """Return the error for codes that would become values without their scales."""
        scales = " and ".join(self.scales[key])
        return PlacementError(
            f"its values are codes, which are wrong without {scales}",
            file=path,
            entry=key,
            expected="values that a transform has multiplied by their scales",
            found=_name(dtype),
            hint=self.hint("Leave the dtype of quantised tensors as it is: return None for them."),
            lists=[self.line],
        )

    def hint(self, start: str) -> Hint:
        """Return the way out, after the sentence for those who keep the tensors quantised."""
        ends = dict.fromkeys(key.rpartition(".")[2] for key in self.of_scales)
        patterns = tuple(sorted(f"*{end}" for end in ends))
        return Hint(
            f"{start} Or pass ",
            Argument("transform", "a function that applies the scales"),
            " and ",
            Argument("exclude", repr([*patterns]), patterns),
            ', as "Quantised weights" in the guide shows.',
        )

    @property
    def line(self) -> str:
        """The quantised tensors with their scales, for the lists of an error."""
        pairs = [f"{codes} with {' and '.join(keys)}" for codes, keys in self.scales.items()]
        return f"quantised ({len(pairs)}): {clipped_list(pairs)}"


def find_quantised(tensors: Mapping[str, _Tensor]) -> Quantised:
    """Return the quantised tensors among all tensors of a checkpoint."""
    modules: dict[str, list[str]] = {}
    known: dict[object, bool] = {}  # a model has few dtypes and many tensors
    for key, one in tensors.items():
        dtype = one.dtype
        if dtype not in known:
            known[dtype] = is_code(dtype)
        if known[dtype]:
            modules.setdefault(_module_of(key), []).append(key)
    found: dict[str, list[str]] = {}
    for key, one in tensors.items() if modules else ():
        match = _SCALE.fullmatch(key)
        # Some scales are quantised themselves.
        if match is None or not _name(one.dtype).startswith(("float", "bfloat", "uint8")):
            continue
        head = match[1]
        whole = head.rstrip("._:")
        for codes in dict.fromkeys((*modules.get(_module_of(whole), ()), *modules.get(whole, ()))):
            other = tensors[codes]
            is_fewer = math.prod(one.shape) < math.prod(other.shape)
            if codes != key and is_fewer and _belongs(head, codes, _name(other.dtype)):
                found.setdefault(codes, []).append(key)
    return Quantised({codes: tuple(keys) for codes, keys in found.items()})


def is_code(dtype: object) -> bool:
    """Return whether tensors of a dtype, or of its name, may hold codes."""
    return (name := _name(dtype)) in _CODES or name.startswith("float8")


def _belongs(head: str, codes: str, dtype: str) -> bool:
    """Return whether the name of a scale begins with the name of these codes or of their module."""
    rest = codes[len(head) :]
    if codes == head.rstrip("._:"):
        return True
    if not codes.startswith(head) or "." in rest:
        return False
    is_named = head[-1:] not in ("", ".")
    return is_named or dtype.startswith("float") or _WEIGHT.search(rest) is not None


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _module_of(key: str) -> str:
    return key.rpartition(".")[0]
