"""Record the construction of a module and replay it."""

from torchlift._skeleton.construction import changed_on_meta as changed_on_meta
from torchlift._skeleton.construction import constructions_of as constructions_of
from torchlift._skeleton.construction import forget as forget
from torchlift._skeleton.construction import make as make
from torchlift._skeleton.construction import materialize as materialize
from torchlift._skeleton.construction import skeleton as skeleton
from torchlift._skeleton.construction import strided as strided
