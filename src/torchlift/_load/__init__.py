"""`load`: plan, fetch, commit; all of it or nothing."""

from torchlift._load.fetch import fetch_all as fetch_all
from torchlift._load.fetch import transformed as transformed
from torchlift._load.load import Agreed as Agreed
from torchlift._load.load import load as load
from torchlift._load.load import place as place
from torchlift._load.load import require_intact as require_intact
