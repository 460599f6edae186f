"""What import-linter cannot see of the house: names at a glance, doors, a picture of it."""

from __future__ import annotations

import ast
from collections import Counter

import house


def test_the_top_is_seen_at_a_glance() -> None:
    """No more names than the drawing of the house has."""
    names = {path.stem for path in house.PACKAGE.glob("*.py")}
    names |= {path.parent.name for path in house.PACKAGE.glob("*/__init__.py")}
    assert len(names) <= 24


def test_every_room_of_several_files_has_a_door_that_a_contract_holds() -> None:
    """A room that is added is held too: import-linter knows the rooms that it is told of."""
    contracts = house.contracts()
    known = {c["protected_modules"][0] for c in contracts if c["type"] == "protected"}
    folders = {path.parent.name for path in house.PACKAGE.glob("*/__init__.py")}
    folders -= {"_system"}  # other rooms import from its files
    assert known == {f"torchlift.{name}.*" for name in folders}


def test_the_package_itself_only_names_what_is_public() -> None:
    """A table of names: it defines nothing, and imports what reads the table."""
    tree = ast.parse(house.PACKAGE.joinpath("__init__.py").read_text(encoding="utf-8"))
    kinds = Counter(type(node).__name__ for node in tree.body[1:])  # after its docstring
    assert kinds == {"ImportFrom": 3, "If": 1, "Assign": 2}
    imported = [ast.unparse(n) for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert [line for line in imported if "torchlift" in line] == [
        "from torchlift._lazy import lazy"
    ]


def test_every_room_says_its_job_in_one_line() -> None:
    """The first line of its docstring is a whole sentence: it stands alone in the picture."""
    for layer in house.layers():
        for room in house.rooms(layer):
            assert house.summary(room).endswith("."), room


def test_the_picture_of_the_house_is_drawn_from_the_contract() -> None:
    """Run ``python tools/house.py`` after a room has moved or changed its job."""
    found = house.BLOCK.search(house.GUIDE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[1] == house.picture()
