"""What a file is, from its first bytes; above all, what it is that torchlift does not read."""

from __future__ import annotations

from torchlift.errors import FormatError

#: Bytes at the start of a file that the detectors see.
HEAD = 512

_SAVE_AGAIN = "Where you trust the file, load it with torch.load and save it again with torch.save."

#: (offset, magic, what it is, what to do). The first that fits counts.
_FOREIGN: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
     "a torch file in the format used before torch 1.6, which torchlift does not read yet",
     _SAVE_AGAIN),
    (257, b"ustar", "a tar archive (torch's oldest format is one)",
     f"Unpack it first, or: {_SAVE_AGAIN}"),
    (0, b"version https://git-lfs.github.com/spec/",
     "a git-lfs pointer: the place of the weights, not the weights",
     "Fetch the file itself: git lfs pull."),
    (0, b"GGUF", "a GGUF file", "Convert it with the tools of llama.cpp or gguf-py."),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras writes", "Read it with h5py."),
    (0, b"\x93NUMPY", "a numpy array", "Read it with numpy.load."),
    (0, b"\x1f\x8b", "a gzip archive", "Decompress it first."),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive", "Decompress it first."),
    (0, b"\xfd7zXZ\0", "an xz archive", "Decompress it first."),
    (0, b"BZh", "a bzip2 archive", "Decompress it first."),
    (0, b"\x7fELF", "a program", "It holds no checkpoint."),
    *((0, bytes((0x80, protocol)), "a pickle that torch.save did not write",
       "Only unpickling could read it, which can run any code: ask for a file written by "
       "torch.save or safetensors.") for protocol in range(2, 6)),
)  # fmt: skip


def is_zip(head: bytes, size: int) -> bool:
    """Whether it starts like a zip archive."""
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06")


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether it starts like safetensors, even one whose header length is absurd."""
    return head[8:9] == b"{" and not _is_text(head[:8])


def is_json(head: bytes, size: int) -> bool:
    """Whether it starts like a JSON object."""
    return head.lstrip()[:1] == b"{" and _is_text(head)


def foreign(head: bytes, size: int) -> FormatError:
    """The error for a file that no reader takes: what it is and what to do."""
    expected = "a torch or safetensors file, or an *.index.json"
    for offset, magic, what, hint in _FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            return FormatError(what, expected=expected, hint=hint)
    hint = "Check that the right file was fetched, completely."
    if not size:
        return FormatError("an empty file", expected=expected, hint=hint)
    if not head.strip(b"\0"):
        return FormatError("a file that starts with zeros only", expected=expected, hint=hint)
    if head.lstrip()[:1] == b"<":
        hint = "A login or error page was saved instead of the file; fetch it again."
        return FormatError("a web page or another XML text", expected=expected, hint=hint)
    if _is_text(head):
        return FormatError("a text file, not a checkpoint", expected=expected, hint=hint)
    return FormatError(
        "not a checkpoint that torchlift reads",
        expected=expected,
        found=f"{size} bytes starting with {head[:8]!r}",
        hint=hint,
    )


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The head may end within a character.
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode("utf-8")
    return bool(text) and all(c.isprintable() or c in "\r\n\t" for c in text)
