"""The house holds: rooms on floors, imports that lead down, and a picture that says the same."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import house

FILES = sorted(house.PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a file; a folder's is that of its ``__init__``."""
    parts = path.relative_to(house.PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of_files() -> dict[str, set[str]]:
    """Module -> modules of torchlift that it imports, in functions and for types too."""
    trees = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}: a relative import"
                full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                names |= {full[n] if full[n] in trees else str(node.module) for n in full}
        found[module] = (names & trees.keys()) - {module}
    return found


def room_of(module: str) -> str:
    """The name below ``torchlift``; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def test_no_files_import_each_other_in_a_circle() -> None:
    """A file can be read, and moved, without those that are built on it."""
    TopologicalSorter(imports_of_files()).prepare()  # raises a CycleError that names the circle


def test_imports_among_rooms_lead_down() -> None:
    """From a higher floor to a lower one, or along a floor whose rooms may know each other.

    The package itself, which only names what is public, stands outside of the floors.
    """
    layers = house.layers()
    floor = {room: -number for number, layer in enumerate(layers) for room in house.rooms(layer)}
    wrong = [
        f"{module} imports {other}"
        for module, others in imports_of_files().items()
        for other in others
        if (above := room_of(module)) and (below := room_of(other)) and above != below
        if floor[above] < floor[below]
        or (floor[above] == floor[below] and "|" in layers[-floor[above]])
    ]
    assert not wrong


def test_every_room_has_a_floor_and_the_top_is_seen_at_a_glance() -> None:
    """No more names than the drawing of the house has, each of them in the contract."""
    names = {path.stem for path in house.PACKAGE.glob("*.py")}
    names |= {path.parent.name for path in house.PACKAGE.glob("*/__init__.py")}
    assert len(names) <= 23
    assert names - {"__init__"} == {room for layer in house.layers() for room in house.rooms(layer)}


def test_every_room_of_several_files_has_a_door_that_a_contract_holds() -> None:
    """A room that is added is held too: import-linter knows the rooms that it is told of."""
    contracts = house.contracts()
    known = {c["protected_modules"][0] for c in contracts if c["type"] == "protected"}
    folders = [path.parent.name for path in house.PACKAGE.glob("*/__init__.py")]
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
