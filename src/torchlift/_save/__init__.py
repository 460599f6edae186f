"""Save what one process holds, and lay out what a mesh does: checked, flushed, all or nothing."""

from __future__ import annotations

from torchlift._save.blocks import BLOCK, Workspace, tensor_blocks
from torchlift._save.contents import Contents, Described
from torchlift._save.files import write_error
from torchlift._save.pickling import Shared, torch_pickle
from torchlift._save.save import SaveReport, Target, finish, from_files, save
from torchlift._save.values import Becomes

__all__ = [
    "BLOCK", "Becomes", "Contents", "Described", "SaveReport", "Shared", "Target", "Workspace",
    "finish", "from_files", "save", "tensor_blocks", "torch_pickle", "write_error",
]  # fmt: skip
