"""Save what one process or all of a mesh hold: checked, flushed, all or nothing."""

from torchlift._save.blocks import memory_of as memory_of
from torchlift._save.files import DCP_FILES as DCP_FILES
from torchlift._save.files import Files as Files
from torchlift._save.files import Output as Output
from torchlift._save.files import Section as Section
from torchlift._save.files import Sums as Sums
from torchlift._save.files import behind as behind
from torchlift._save.files import dcp_layout as dcp_layout
from torchlift._save.files import torch_output as torch_output
from torchlift._save.files import write_error as write_error
from torchlift._save.files import write_frames as write_frames
from torchlift._save.files import write_sections as write_sections
from torchlift._save.mesh import Share as Share
from torchlift._save.pickling import require_plain as require_plain
from torchlift._save.saving import SaveReport as SaveReport
from torchlift._save.saving import Target as Target
from torchlift._save.saving import finish as finish
from torchlift._save.saving import from_files as from_files
from torchlift._save.saving import save as save
from torchlift._save.values import Becomes as Becomes
from torchlift._save.values import Taken as Taken
from torchlift._save.values import Value as Value
from torchlift._save.values import stored_as as stored_as
from torchlift._save.values import untied as untied
