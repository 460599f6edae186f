"""Draw the rooms of src/torchlift in CONTRIBUTING.md, from the contract that import-linter checks.

    python tools/house.py

A room's line is the first one of its docstring, so that a room which changes its job says so here.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "torchlift"
GUIDE = ROOT / "CONTRIBUTING.md"

#: What stands in CONTRIBUTING.md before, in and after the picture.
BLOCK = re.compile(
    r"(?<=<!-- python tools/house.py -->\n)```text\n(.*?)```(?=\n<!-- end -->)", re.DOTALL
)


def contracts() -> list[dict[str, Any]]:
    """Return what import-linter checks."""
    config = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = config["tool"]["importlinter"]["contracts"]
    return found


def layers() -> list[str]:
    """Return the floors as the contract writes them, from the top."""
    found: list[str] = next(c["layers"] for c in contracts() if c["type"] == "layers")
    return found


def rooms(layer: str) -> list[str]:
    """Return the rooms of a floor."""
    return re.split(r"\s*[:|]\s*", layer)


def summary(room: str) -> str:
    """Return the first line of a room's docstring."""
    folder = PACKAGE / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def picture() -> str:
    """Return one line for each room, with the number of its floor, from the top."""
    floors = [rooms(layer) for layer in layers()]
    width = max(len(room) for floor in floors for room in floor)
    lines = []
    for number, floor in zip(range(len(floors), 0, -1), floors, strict=True):
        for label, room in zip([number, *[""] * len(floor)], floor, strict=False):
            lines.append(f"{label:>2}  {room:<{width}}  {summary(room)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the picture into CONTRIBUTING.md and print it."""
    drawn = f"```text\n{picture()}```"
    GUIDE.write_text(BLOCK.sub(lambda _: drawn, GUIDE.read_text(encoding="utf-8")), "utf-8")
    print(picture(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
