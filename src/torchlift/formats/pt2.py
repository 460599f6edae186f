"""Exported programs (``torch.export.save``): the state dict, without the program.

Since torch 2.8, the weights are records below ``data/weights``, and a JSON text lists the name,
shape, strides and record of each tensor. Older versions of torch put whole files of ``torch.save``
into the archive. Constants of the program are not weights: they are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchlift.errors import FormatError
from torchlift.formats.index import ITEMSIZE, Index, Record, TensorEntry, join
from torchlift.formats.source import Source, errors_name, parse_json
from torchlift.formats.torch_pickle import StorageRef, TensorRef
from torchlift.formats.torch_zip import (
    Resolver,
    look_up,
    read_notes,
    read_torch_zip,
    zip_resolver,
)
from torchlift.formats.zip_archive import STORED, expect_records, read_record

#: The folder of the weights, and the file of torch.save that has them in archives before torch 2.8.
_WEIGHTS, _OLD = "data/weights/", "serialized_state_dict.pt"

_STRIDED = 7
#: Versions of the archive (torch/csrc/export/pt2_archive_constants.h).
_VERSIONS = (b"0",)

#: Numbers of the schema (torch/_export/serde/schema.py, ``ScalarType``).
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32",
    8: "float64", 9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16",
    28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip


def is_pt2(records: Mapping[str, Record], top: str) -> bool:
    """Return whether an archive holds exported programs."""
    return any(top + name in records for name in ("archive_format", _OLD))


def read_pt2(source: Source, records: dict[str, Record], top: str) -> Index:
    """Read the index of an exported program, or of several in one archive.

    Args:
        source: The archive.
        records: Its records.
        top: The folder of all records, with its slash.

    Returns:
        The state dict under its own names. If the archive has several programs, each state dict is
        below the name of its program.

    Raises:
        FormatError: If it is not such an archive, or is damaged or inconsistent.
    """
    if both := [name for name in ("constants.pkl", "data.pkl") if top + name in records]:
        raise FormatError(
            "the archive has two contents, one for torch.load and one for torch.export.load",
            found=", ".join(both),
            hint="Write the file again.",
        )
    if _OLD in records:
        return _joined(source, [_nested(source, records[_OLD], "")], {})
    # At a URL, all small records are fetched together instead of one request for each.
    needed = (".json", "version", "byteorder")
    expect_records(source, [at for name, at in records.items() if name.endswith(needed)])
    version = look_up(records, top + "archive_version")
    if version and read_record(source, version).strip() not in _VERSIONS:
        raise FormatError("torch does not read this version of exported programs", entry=top)
    notes = read_notes(source, records, top)
    # torch would read the numbers as they are, so all of them would be wrong.
    if notes.get("byteorder") == "big":
        raise FormatError(
            "the program was exported on a big-endian machine, and torch does not swap its bytes",
            entry=f"{top}byteorder",
            expected="little",
            hint="Export it again on a little-endian machine.",
        )
    # A package may hold compiled programs only, or several exported ones.
    models = [
        name.removeprefix(f"{top}models/").removesuffix(".json")
        for name in records
        if name.startswith(f"{top}models/") and name.endswith(".json")
    ]
    if not models:
        raise FormatError(
            "the package contains only compiled programs, which include their weights",
            expected="exported programs with separate weights",
            hint="Save the exported program itself: torch.export.save.",
        )
    found = []
    folder = top + _WEIGHTS
    resolver = zip_resolver(source, records, folder, _WEIGHTS, notes)
    for model in models:
        under = model if len(models) > 1 else ""
        whole, config = f"{folder}{model}.pt", f"{folder}{model}_weights_config.json"
        if whole in records:
            found.append(_nested(source, records[whole], under))
        elif config in records:
            found.append(_listed(source, records, config, resolver, folder, under))
        else:
            raise FormatError("the weights of a program are missing", entry=config)
    return replace(_joined(source, found, notes), records=resolver.others())


def _joined(source: Source, found: list[Index], notes: dict[str, str]) -> Index:
    return join(source.path, "pt2", found, notes, "two weights of an exported program have one key")


def _nested(source: Source, record: Record, under: str) -> Index:
    """Read a file of ``torch.save`` inside the archive."""
    with errors_name(source.path, record.name):
        if record.method != STORED:
            raise FormatError(
                "a file in the archive is compressed, so it cannot be mapped",
                hint="Unpack the archive and pack it again without compression.",
            )
        window = source.window(record.offset, record.nbytes)
        return read_torch_zip(window, under or None, f"{record.name}/")


def _listed(
    source: Source,
    records: dict[str, Record],
    config: str,
    resolver: Resolver,
    folder: str,
    under: str,
) -> Index:
    """Read a list of tensors and the records they look into."""
    with errors_name(source.path, config):
        text = read_record(source, records[config])
        listed = parse_json(text, "the list of tensors").get("config")
        if not isinstance(listed, dict):
            raise FormatError("the list of tensors lacks its config")
    entries: dict[str, TensorEntry] = {}
    blocked: dict[str, str] = {}
    inside: dict[str, int] = {}
    nested: list[Index] = []
    opened: set[str] = set()
    dtypes: dict[str, str] = {}
    for name, meta in listed.items():
        key = f"{under}.{name}" if under else name
        source.budget.spend(len(under), under)  # a long program name is repeated in each key
        with errors_name(source.path, key):
            path = _field(meta, "path_name", str)
            stored = records.get(folder + path)
            if stored is None:
                raise FormatError("the record of a tensor is missing", expected=folder + path)
            tensor = meta.get("tensor_meta")
            if _field(meta, "use_pickle", bool):
                if path in opened:  # it would be read again for each of a thousand names
                    raise FormatError("two tensors use one pickled file", expected="one each")
                opened.add(path)
                nested.append(_nested(source, stored, key))
            # The record does not say how the indices and values of a sparse tensor lie in it.
            elif _field(tensor, "layout", int) != _STRIDED:
                blocked[key], inside[key] = "torch._utils._rebuild_sparse_tensor", 1
            else:
                ref = _tensor(meta, tensor, path, stored)
                if dtypes.setdefault(path, ref.dtype) != ref.dtype:
                    raise FormatError(
                        "two tensors in one record have two dtypes, and torch reads one of them",
                        expected=f"{dtypes[path]}, as at first",
                        found=ref.dtype,
                    )
                entries[key] = resolver.entry(key, ref)
    mine = Index(
        path=source.path,
        format="pt2",
        tensors=entries,
        storages=resolver.storages,
        files={source.path: source.stamp},
        blocked=tuple(dict.fromkeys(blocked.values())),
        blocked_keys=blocked,
        blocked_tensors=inside,
    )
    return _joined(source, [mine, *nested], {})


def _tensor(meta: Any, tensor: Any, path: str, stored: Record) -> TensorRef:
    """Return the record of a tensor in the list."""
    number = _field(tensor, "dtype", int)
    if number not in _DTYPES:
        raise FormatError("torchlift does not know this dtype", found=number)
    device = _field(tensor, "device", dict)
    location, index = _field(device, "type", str), device.get("index")
    location = f"{location}:{index}" if type(index) is int else location
    shape = tuple(map(_whole, _field(tensor, "sizes", list)))
    if stored.nbytes % ITEMSIZE[_DTYPES[number]]:
        raise FormatError(
            "the size of a record is not a multiple of the element size",
            expected=f"a multiple of {ITEMSIZE[_DTYPES[number]]} bytes of {_DTYPES[number]}",
            found=f"{stored.nbytes} bytes",
        )
    if not stored.nbytes and 0 not in shape:
        raise FormatError(
            "the weight was not saved, and torch would use zeros instead",
            hint="Export the program with its weights instead of fake tensors.",
        )
    return TensorRef(
        StorageRef(None, path, location, stored.nbytes),
        _DTYPES[number],
        _whole(_field(tensor, "storage_offset", dict)),
        shape,
        tuple(map(_whole, _field(tensor, "strides", list))),
        tensor.get("requires_grad"),
        is_parameter=meta.get("is_param") is True,
    )


def _whole(number: object) -> object:
    """Return a size. A symbolic expression stays what it is, and a later check refuses it."""
    return number.get("as_int") if isinstance(number, dict) else number


def _field(record: object, name: str, kind: type) -> Any:
    found = record.get(name) if isinstance(record, dict) else None
    if type(found) is not kind:
        raise FormatError(
            f"the list of tensors has a wrong {name!r} for this key",
            expected=kind.__name__,
            found="nothing" if found is None else type(found).__name__,
        )
    return found
