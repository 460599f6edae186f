"""What import-linter cannot see of the house: names at a glance, exports, a picture of it."""

from __future__ import annotations

import ast

import house


def test_a_private_room_exports_nothing() -> None:
    """Other rooms import from its files: its ``__init__`` is its docstring."""
    public = {"bench", "cli", "distributed", "integrations", "measure", "remap"}
    for path in house.PACKAGE.glob("*/__init__.py"):
        if path.parent.name not in public:
            assert len(ast.parse(path.read_text(encoding="utf-8")).body) == 1, path


def test_a_name_with_an_underscore_stays_in_its_file() -> None:
    """What another file uses has a name without one."""
    for path in house.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchlift."):
                assert not [one.name for one in node.names if one.name.startswith("_")], path


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
