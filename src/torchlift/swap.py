"""Live modules: new content for the same Python objects, so that every holder sees it.

Optimizers, averages and compiled graphs hold the parameters of a module. `preflight` lists the
tensors whose content cannot be exchanged, and their holders. `preserving_references` makes torch's
own conversions exchange content. `module_load` registers how a tensor subclass is loaded.
"""

from __future__ import annotations

from torchlift._model.handlers import Registration, module_load
from torchlift._model.holders import Blocker, preflight, preserving_references

__all__ = ["Blocker", "Registration", "module_load", "preflight", "preserving_references"]
