"""`load`: plan, fetch, commit; all of it or nothing."""

from torchlift._load.fetch import Fetched as Fetched
from torchlift._load.fetch import fetch_all as fetch_all
from torchlift._load.fetch import transformed as transformed
from torchlift._load.loading import Agreed as Agreed
from torchlift._load.loading import copy_in_place as copy_in_place
from torchlift._load.loading import load as load
from torchlift._load.loading import place as place
from torchlift._load.loading import put_new as put_new
from torchlift._load.loading import require_intact as require_intact
