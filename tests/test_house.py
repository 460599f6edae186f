"""What import-linter cannot see of the house: names at a glance, exports, a picture of it."""

from __future__ import annotations

import ast
from collections import Counter

import house


def test_the_top_is_seen_at_a_glance() -> None:
    """No more names than the drawing of the house has."""
    names = {path.stem for path in house.PACKAGE.glob("*.py")}
    names |= {path.parent.name for path in house.PACKAGE.glob("*/__init__.py")}
    assert len(names) <= 24


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
