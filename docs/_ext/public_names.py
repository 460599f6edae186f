"""Give each name in a docstring its link: public names, parameters and fields.

Annotations name a class by the module that defines it, ``torchlift._checkpoint.Checkpoint``.
Readers know the public name only, and only that one has a page. Docstrings put a function's
parameters and a class's fields in single backticks, like every name; these have no page and are set
as code.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING

from sphinx.util.typing import ExtensionMetadata

import torchlift

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_NAME = re.compile(r"(?<![`:\w])`(\w+)`(?!`)")


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.reference | None:
    """Try the spelling that has a page for a torchlift name that has none."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    domain = env.domains.python_domain
    parts = target.removeprefix("torchlift.").split(".")
    for start in range(len(parts)):
        tail = parts[start:]
        if not tail[0][:1].isupper():
            continue
        public = ".".join(["torchlift", *tail])
        if tail[0] not in torchlift.__all__:
            suffix = "." + ".".join(tail)
            pages = [n for n in domain.objects if n.startswith("torchlift.") and n.endswith(suffix)]
            if len(pages) != 1:
                continue
            public = pages[0]
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    return None


def local_names(what: str, obj: object, full_name: str) -> set[str]:
    """Parameters of a function, fields of a class; for a member, those of its class too."""
    owners = [obj.fget if isinstance(obj, property) else obj]
    if what in ("method", "property", "attribute"):
        path = full_name.split(".")
        module = getattr(inspect.unwrap(owners[0]), "__module__", None) if owners[0] else None
        owner = getattr(sys.modules.get(module or ""), path[-2], None) if len(path) > 1 else None
        owners.append(owner)
    names: set[str] = set()
    for owner in owners:
        if inspect.isclass(owner):
            for base in owner.__mro__:
                if base.__module__.startswith("torchlift"):
                    names.update(inspect.get_annotations(base))
            owner = owner.__init__
        if callable(owner):
            try:
                names.update(inspect.signature(owner).parameters)
            except (TypeError, ValueError):
                continue
    return names


def set_local_names_as_code(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Double the backticks around names that mean something inside this docstring only."""
    local = local_names(what, obj, name)

    def double(match: re.Match[str]) -> str:
        return f"``{match[1]}``" if match[1] in local else match[0]

    lines[:] = [_NAME.sub(double, line) for line in lines]


def make_signature_readable(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    args: str | None,
    ret: str | None,
) -> tuple[str | None, str | None]:
    """``<factory>``, a dataclass's unnamed default, is no Python: Sphinx would stumble."""
    return (args.replace("<factory>", "...") if args else args), ret


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", set_local_names_as_code, priority=400)
    app.connect("autodoc-process-signature", make_signature_readable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
