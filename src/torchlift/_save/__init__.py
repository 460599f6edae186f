"""Save what one process or all of a mesh hold: checked, flushed, all or nothing."""

from __future__ import annotations

from torchlift._save.files import (
    DCP_FILES,
    Files,
    Output,
    Section,
    Sums,
    behind,
    dcp_layout,
    torch_output,
    write_error,
    write_frames,
    write_sections,
)
from torchlift._save.mesh import Share
from torchlift._save.pickling import require_plain
from torchlift._save.save import SaveReport, Target, finish, from_files, save
from torchlift._save.values import Becomes, Taken, Value, untied

__all__ = [
    "DCP_FILES", "Becomes", "Files", "Output", "SaveReport", "Section", "Share", "Sums", "Taken",
    "Target", "Value", "behind", "dcp_layout", "finish", "from_files", "require_plain", "save",
    "torch_output", "untied", "write_error", "write_frames", "write_sections",
]  # fmt: skip
