"""Byte ranges of files and tensors: map, read, write."""

from torchlift._transfer.crc import Folder as Folder
from torchlift._transfer.files import Files as Files
from torchlift._transfer.files import file_system as file_system
from torchlift._transfer.files import is_network as is_network
from torchlift._transfer.pages import allocate as allocate
from torchlift._transfer.pinned import Sender as Sender
from torchlift._transfer.reading import BUDGET as BUDGET
from torchlift._transfer.reading import STAGING as STAGING
from torchlift._transfer.reading import Request as Request
from torchlift._transfer.reading import Seen as Seen
from torchlift._transfer.reading import is_readable as is_readable
from torchlift._transfer.reading import read as read
from torchlift._transfer.reading import requests_for as requests_for
from torchlift._transfer.write import AtomicFile as AtomicFile
from torchlift._transfer.write import AtomicSet as AtomicSet
from torchlift._transfer.write import LockedFile as LockedFile
from torchlift._transfer.write import NotDurable as NotDurable
from torchlift._transfer.write import NotRemoved as NotRemoved
from torchlift._transfer.write import Runs as Runs
from torchlift._transfer.write import SetKind as SetKind
from torchlift._transfer.write import is_there as is_there
from torchlift._transfer.write import make_durable as make_durable
from torchlift._transfer.write import remove_debris as remove_debris
from torchlift._transfer.write import with_token as with_token
from torchlift._transfer.write import write_at as write_at
