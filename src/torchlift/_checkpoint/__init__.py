"""`open`, `Checkpoint` and `diff`: an index as a lazy mapping of tensors; knows no models."""

from torchlift._checkpoint.checkpoint import FEW as FEW
from torchlift._checkpoint.checkpoint import Checkpoint as Checkpoint
from torchlift._checkpoint.checkpoint import MappedViews as MappedViews
from torchlift._checkpoint.checkpoint import dtype_of as dtype_of
from torchlift._checkpoint.checkpoint import open as open
from torchlift._checkpoint.checkpoint import shared_records as shared_records
from torchlift._checkpoint.comparison import CheckpointDiff as CheckpointDiff
from torchlift._checkpoint.comparison import diff as diff
from torchlift._checkpoint.kinds import Allow as Allow
from torchlift._checkpoint.kinds import TensorCall as TensorCall
from torchlift._checkpoint.kinds import array_of as array_of
from torchlift._checkpoint.kinds import calculated as calculated
from torchlift._checkpoint.kinds import call_of as call_of
from torchlift._checkpoint.kinds import classes as classes
from torchlift._checkpoint.kinds import dense_of as dense_of
from torchlift._checkpoint.kinds import readable_parts as readable_parts
from torchlift._checkpoint.tree import Tree as Tree
from torchlift._checkpoint.tree import arranged as arranged
from torchlift._checkpoint.tree import gathered as gathered
from torchlift._checkpoint.tree import objects_as_saved as objects_as_saved
