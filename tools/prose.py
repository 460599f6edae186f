"""Find sentences that need two readings: in pages, recipes, docstrings and error messages.

    python tools/prose.py [FILE ...]

Without files it counts each area of the repository. More than its ceiling is an error.
With files it prints the sentences of these files. A ceiling may only go down.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Name -> what must not be in a sentence. A question may start with What, Who or Where.
PATTERNS = {
    "starts with What or Who": re.compile(r"(What|Who)(ever)?\b(?!.*\?$)"),
    "starts with Of or Where": re.compile(r"(Of|Where)\b(?!.*\?$)"),
    "of which, of whom, of those": re.compile(r".*\bof (which|whom|those)\b"),
    "is no, has no": re.compile(r".*\b(is|are|has|have) no \w"),
    "semicolon": re.compile(r".*;"),
    "more than 25 words": re.compile(r"(\S+ ){25}\S"),
}
#: Area -> how many bad sentences it may have.
CEILINGS = {
    "README.md": 0,
    "CONTRIBUTING.md": 0,
    "SECURITY.md": 0,
    "CHANGELOG.md": 0,
    "docs": 0,
    "recipes": 0,
    "docstrings of src": 101,
    "messages of src": 0,
}
#: Directives of reStructuredText whose content is not prose.
CODE = (
    r"(code|code-block|parsed-literal|raw|literalinclude|\w+-output|include|toctree|meta|auto\w+|"
    r"currentmodule|minigallery|button-ref|image|figure|index)"
)
DROPPED = {
    ".md": r"^```.*?^```|^\|[-:|]+$|<!--.*?-->|^#+ |^> (\[!\w+\]$)?",
    ".rst": rf"^( *)\.\. {CODE}::.*\n((\1 +.*)?\n)*|^ *\.\. .*$|^ *:[\w-]+:.*$|^[=~^-]{{3,}}$",
    # The title of a recipe is what people search for, or the words of an error.
    ".py": r"^ *(>>>|\.\.\.).*$|^ *\w+(, \w+)*:(?= )|^ *[A-Z]\w+:$|^.+\n={3,}$|^=+.*$",
}
#: A sentence may start with code, which is an X by then, or with the name of this library.
SENTENCE_END = re.compile(r"(?:(?<=[.?!])|(?<=[.?!]\*\*)) (?=[A-Z*]|torchlift )")


def sentences(text: str, suffix: str) -> list[str]:
    """Return the sentences of more than three words; code and links count as one word."""
    text = re.sub(DROPPED[suffix], "", text, flags=re.MULTILINE | re.DOTALL * (suffix == ".md"))
    text = re.sub(r"``[^`]*``|(:[\w:]+:)?`[^`]*`_*|!?\[[^\]]*\]\([^)]*\)", "X", text)
    blocks = (
        " ".join(b.split())
        for b in re.split(r"\n\s*\n(?:[-*|] )*|(?:^|\n)\s*(?:[-*|] )+| ?\|(?=\s)", text)
    )
    found = [one for b in blocks for one in SENTENCE_END.split(b)]
    return [one.strip() for one in found if len(one.split()) > 3]


def literal(node: ast.AST) -> Iterator[str]:
    """Yield each string of an expression; a value in an f-string is one word."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from literal(child)


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind of prose and the text, of a page or of each part of a Python file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield "page", text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            yield "docstrings", ast.get_docstring(node) or ""
        elif isinstance(node, ast.Raise):
            yield from (("messages", each) for each in literal(node))
    text = re.sub(r"(?m)^# .+\n# -{3,}$|^# fold: .*$", "", text)  # headings, and what is folded
    comments = [
        line.removeprefix("#").strip() for line in re.findall(r"(?m)^#(?! [%-]).*|^$", text)
    ]
    yield "comments", "\n".join(comments)


def faults(path: Path, *kinds: str) -> list[str]:
    """Return one line for each bad sentence of a file, with what is wrong with it."""
    found = []
    for kind, text in texts(path):
        for one in sentences(text, path.suffix) if not kinds or kind in kinds else ():
            wrong = [name for name, pattern in PATTERNS.items() if pattern.match(one)]
            found += [f"{path}: {', '.join(wrong)}: {one}"] if wrong else []
    return found


def area(name: str) -> list[str]:
    """Return the bad sentences of an area."""
    kind, _, folder = name.rpartition(" of ")
    if kind:
        files = sorted(ROOT.joinpath(folder).rglob("*.py"))
    elif name == "recipes":
        files = sorted(ROOT.glob("recipes/*/*.py"))
    else:
        pages = (ROOT.glob(f"{name}/**/*{suffix}") for suffix in (".md", ".rst"))
        files = sorted(chain(*pages)) or [ROOT / name]
    ours = [path for path in files if not {"auto_recipes", "_build", "generated"} & {*path.parts}]
    return [line for path in ours for line in faults(path, *kind.split())]


def main(arguments: list[str], ceilings: dict[str, int] = CEILINGS) -> int:
    """Print what is wrong with the files, or with the areas that exceed their ceiling."""
    if arguments:
        lines = [line for each in arguments for line in faults(Path(each))]
        print(*lines, sep="\n")
        return bool(lines)
    status = 0
    for name, ceiling in ceilings.items():
        lines = area(name)
        if len(lines) > ceiling:
            print(*lines, sep="\n")
            status = 1
        if len(lines) != ceiling:
            print(f"{name}: {len(lines)} bad sentences, the ceiling is {ceiling}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
