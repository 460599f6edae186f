"""Live modules: new content for the same Python objects, so that every holder sees it.

An optimizer, an average, a compiled graph hold on to the parameters of a module. `preflight` says
whether their content can be exchanged and who is in the way, `preserving_references` makes torch's
own conversions exchange it, and `module_load` lets a tensor subclass say how it is loaded.
"""

from __future__ import annotations

from torchlift._model.handlers import Registration, module_load
from torchlift._model.holders import Blocker, preflight, preserving_references

__all__ = ["Blocker", "Registration", "module_load", "preflight", "preserving_references"]
