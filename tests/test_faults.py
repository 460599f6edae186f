"""The faults of `tools/faults.py` can be seeded into the code of today. None of them runs here."""

from __future__ import annotations

import ast

import faults
import pytest


def test_every_fault_has_a_name_of_its_own() -> None:
    """The command chooses faults by their names."""
    assert len(faults.FAULTS) >= 50
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS)


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_todays_code(fault: faults.Fault) -> None:
    """Its old text occurs once, the new text is Python, and its tests exist."""
    text = faults.PACKAGE.joinpath(fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, "write the fault again for the new code"
    ast.parse(text.replace(fault.old, fault.new))
    assert fault.new != fault.old
    assert fault.tests.split()
    assert not [name for name in fault.tests.split() if not (faults.TESTS / name).is_file()]
