"""On-disk formats, each read into the same `Index`; standard library only, no torch."""

from typing import TYPE_CHECKING

from torchlift._lazy import lazy
from torchlift._store import FileStamp as FileStamp
from torchlift._store import Stamp as Stamp
from torchlift.formats.boxes import Placement as Placement
from torchlift.formats.boxes import Span as Span
from torchlift.formats.boxes import as_blocks as as_blocks
from torchlift.formats.boxes import at_indices as at_indices
from torchlift.formats.boxes import grain as grain
from torchlift.formats.boxes import joined as joined
from torchlift.formats.boxes import narrowed as narrowed
from torchlift.formats.boxes import overlaps as overlaps
from torchlift.formats.boxes import permuted as permuted
from torchlift.formats.boxes import placed_spans as placed_spans
from torchlift.formats.boxes import row_major as row_major
from torchlift.formats.boxes import rows as rows
from torchlift.formats.boxes import rows_count as rows_count
from torchlift.formats.boxes import run_count as run_count
from torchlift.formats.boxes import runs as runs
from torchlift.formats.boxes import shape_of_spans as shape_of_spans
from torchlift.formats.boxes import shortest_run as shortest_run
from torchlift.formats.boxes import squeezed as squeezed
from torchlift.formats.boxes import steps_in_file as steps_in_file
from torchlift.formats.boxes import unsqueezed as unsqueezed
from torchlift.formats.dcp import DCP_METADATA as DCP_METADATA
from torchlift.formats.dcp import DCP_SUFFIX as DCP_SUFFIX
from torchlift.formats.dcp import containers as containers
from torchlift.formats.dcp import dcp_items as dcp_items
from torchlift.formats.dcp import metadata_files as metadata_files
from torchlift.formats.dcp import resolved as resolved
from torchlift.formats.detect import optimizer_in as optimizer_in
from torchlift.formats.detect import read_index as read_index
from torchlift.formats.file_object import index_of_object as index_of_object
from torchlift.formats.flattening import MISSING as MISSING
from torchlift.formats.flattening import ROOT_OBJECT as ROOT_OBJECT
from torchlift.formats.flattening import ROOT_TENSOR as ROOT_TENSOR
from torchlift.formats.flattening import Containers as Containers
from torchlift.formats.flattening import Flat as Flat
from torchlift.formats.flattening import below as below
from torchlift.formats.flattening import flat_under as flat_under
from torchlift.formats.flattening import flatten as flatten
from torchlift.formats.flattening import flatten_state as flatten_state
from torchlift.formats.flattening import items_of as items_of
from torchlift.formats.flattening import key_text as key_text
from torchlift.formats.flattening import name_text as name_text
from torchlift.formats.flattening import no_container as no_container
from torchlift.formats.flattening import paths_inside as paths_inside
from torchlift.formats.flattening import select as select
from torchlift.formats.flattening import state_dicts_in as state_dicts_in
from torchlift.formats.flattening import under as under
from torchlift.formats.index import GGUF_BLOCKS as GGUF_BLOCKS
from torchlift.formats.index import ITEMSIZE as ITEMSIZE
from torchlift.formats.index import OF_RANKS as OF_RANKS
from torchlift.formats.index import QUANTIZED as QUANTIZED
from torchlift.formats.index import SUBCLASS as SUBCLASS
from torchlift.formats.index import UNRESOLVED as UNRESOLVED
from torchlift.formats.index import Array as Array
from torchlift.formats.index import Chunk as Chunk
from torchlift.formats.index import Index as Index
from torchlift.formats.index import Kind as Kind
from torchlift.formats.index import Leaf as Leaf
from torchlift.formats.index import Record as Record
from torchlift.formats.index import Records as Records
from torchlift.formats.index import Storage as Storage
from torchlift.formats.index import TensorEntry as TensorEntry
from torchlift.formats.index import allowed as allowed
from torchlift.formats.index import allowing as allowing
from torchlift.formats.index import is_row_major as is_row_major
from torchlift.formats.index import lacking as lacking
from torchlift.formats.index import left_out as left_out
from torchlift.formats.index import matching as matching
from torchlift.formats.index import of_model as of_model
from torchlift.formats.index import require_kept as require_kept
from torchlift.formats.index import used_by as used_by
from torchlift.formats.layout import FORMATS as FORMATS
from torchlift.formats.layout import INDEX_SUFFIX as INDEX_SUFFIX
from torchlift.formats.layout import SETS as SETS
from torchlift.formats.layout import Layout as Layout
from torchlift.formats.layout import Payload as Payload
from torchlift.formats.layout import Stored as Stored
from torchlift.formats.layout import format_for as format_for
from torchlift.formats.layout import is_unicode as is_unicode
from torchlift.formats.ranks import refuse_bare_slice as refuse_bare_slice
from torchlift.formats.safetensors import TIED_KEYS as TIED_KEYS
from torchlift.formats.safetensors import safetensors_layout as safetensors_layout
from torchlift.formats.sharded import index_content as index_content
from torchlift.formats.sharded import is_index as is_index
from torchlift.formats.sharded import put_together as put_together
from torchlift.formats.sharded import shards_of as shards_of
from torchlift.formats.source import errors_name as errors_name
from torchlift.formats.torch_pickle import CONSTANTS as CONSTANTS
from torchlift.formats.torch_pickle import STORAGE_DTYPES as STORAGE_DTYPES
from torchlift.formats.torch_pickle import ArrayRef as ArrayRef
from torchlift.formats.torch_pickle import Blocked as Blocked
from torchlift.formats.torch_pickle import CountRecord as CountRecord
from torchlift.formats.torch_pickle import DeviceName as DeviceName
from torchlift.formats.torch_pickle import Global as Global
from torchlift.formats.torch_pickle import LayoutName as LayoutName
from torchlift.formats.torch_pickle import NumpyDtype as NumpyDtype
from torchlift.formats.torch_pickle import OrderedRecord as OrderedRecord
from torchlift.formats.torch_pickle import SliceText as SliceText
from torchlift.formats.torch_pickle import StorageRef as StorageRef
from torchlift.formats.torch_pickle import TensorRef as TensorRef
from torchlift.formats.torch_pickle import TorchWorld as TorchWorld
from torchlift.formats.torch_pickle import read_torch_pickle as read_torch_pickle
from torchlift.formats.torch_zip import archive_layout as archive_layout
from torchlift.formats.torch_zip import pickle_in as pickle_in
from torchlift.formats.torch_zip import repeats_too_often as repeats_too_often
from torchlift.formats.unpickle import MAX_INT as MAX_INT
from torchlift.formats.unpickle import Budget as Budget
from torchlift.formats.unpickle import check_key as check_key
from torchlift.formats.zip_archive import inflated as inflated

if TYPE_CHECKING:
    from torchlift.formats.crc import PartialCrc as PartialCrc
    from torchlift.formats.crc import register_of as register_of
    from torchlift.formats.crc import whole_crc as whole_crc
    from torchlift.formats.integrity import Checksums as Checksums
    from torchlift.formats.integrity import VerifyReport as VerifyReport
    from torchlift.formats.integrity import checksums as checksums
    from torchlift.formats.integrity import compared as compared
    from torchlift.formats.integrity import hashes_of as hashes_of
    from torchlift.formats.integrity import hub_checksums as hub_checksums
    from torchlift.formats.integrity import sums_of as sums_of
    from torchlift.formats.integrity import verify as verify
    from torchlift.formats.integrity import verify_index as verify_index
    from torchlift.formats.summary import SORTS as SORTS
    from torchlift.formats.summary import counted as counted
    from torchlift.formats.summary import sorted_by as sorted_by
    from torchlift.formats.summary import to_html as to_html
    from torchlift.formats.summary import to_json as to_json
    from torchlift.formats.summary import to_table as to_table
    from torchlift.formats.summary import to_text as to_text
else:
    # `verify` needs no summary, and `inspect` no checksums: each comes when it is asked for.
    __getattr__ = lazy(
        __name__,
        {
            "crc": "PartialCrc register_of whole_crc",
            "integrity": "Checksums VerifyReport checksums compared hashes_of "
            "hub_checksums sums_of verify verify_index",
            "summary": "SORTS counted sorted_by to_html to_json to_table to_text",
        },
    )[0]
