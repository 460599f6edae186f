"""Where bytes are: a file, a URL; size, stamp, reads; no formats, no tensors."""

from typing import TYPE_CHECKING

from torchlift._lazy import lazy
from torchlift._store.files import FileStamp as FileStamp
from torchlift._store.files import Opened as Opened
from torchlift._store.places import Stamp as Stamp
from torchlift._store.places import exists as exists
from torchlift._store.places import head_of as head_of
from torchlift._store.places import hub_checksum as hub_checksum
from torchlift._store.places import in_parallel as in_parallel
from torchlift._store.places import inside as inside
from torchlift._store.places import is_folder as is_folder
from torchlift._store.places import is_url as is_url
from torchlift._store.places import name_of as name_of
from torchlift._store.places import names_in as names_in
from torchlift._store.places import open_place as open_place
from torchlift._store.places import parent as parent
from torchlift._store.places import place_of as place_of
from torchlift._store.places import relative as relative
from torchlift._store.places import shared_folder as shared_folder
from torchlift._store.places import stamp_now as stamp_now
from torchlift._store.places import stamp_of as stamp_of
from torchlift._store.url import Store as Store
from torchlift._store.url import Url as Url
from torchlift._store.url import UrlStamp as UrlStamp

if TYPE_CHECKING:
    from torchlift._store.uploads import Upload as Upload
    from torchlift._store.uploads import is_object as is_object
    from torchlift._store.uploads import listed as listed
    from torchlift._store.uploads import remove as remove
    from torchlift._store.uploads import require_writable as require_writable
    from torchlift._store.uploads import upload as upload
else:
    # What reads does without threads and queues.
    _NAMES = "Upload is_object listed remove require_writable upload"
    __getattr__ = lazy(__name__, {"uploads": _NAMES})[0]
