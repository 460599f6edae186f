"""What a plan draws from: tensors of a file, of memory, of another rank."""

from torchlift._sources.opening import IN_MEMORY as IN_MEMORY
from torchlift._sources.opening import Given as Given
from torchlift._sources.opening import Origin as Origin
from torchlift._sources.opening import StateSource as StateSource
from torchlift._sources.opening import checkpoint as checkpoint
from torchlift._sources.opening import container as container
from torchlift._sources.opening import extra_state as extra_state
from torchlift._sources.opening import flat_state as flat_state
from torchlift._sources.opening import index_of as index_of
from torchlift._sources.opening import is_state as is_state
from torchlift._sources.opening import opened as opened
from torchlift._sources.opening import sources as sources
from torchlift._sources.opening import tensors_in as tensors_in
from torchlift._sources.tensors import Copy as Copy
from torchlift._sources.tensors import FileTensor as FileTensor
from torchlift._sources.tensors import MemoryTensor as MemoryTensor
from torchlift._sources.tensors import Sent as Sent
from torchlift._sources.tensors import SourceTensor as SourceTensor
from torchlift._sources.tensors import Values as Values
from torchlift._sources.tensors import apart as apart
from torchlift._sources.tensors import copy_values as copy_values
from torchlift._sources.tensors import described as described
from torchlift._sources.tensors import is_in_place as is_in_place
from torchlift._sources.tensors import place as place
from torchlift._sources.tensors import tensor_of as tensor_of
from torchlift._sources.tensors import whole_copy as whole_copy
