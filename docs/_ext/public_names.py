"""Give each name in a docstring its link: public names, parameters and fields.

Annotations name a class by the module that defines it, ``torchlift._checkpoint.Checkpoint``.
Readers know the public name only, and only that one has a page. Docstrings put a function's
parameters and a class's fields in single backticks, like every name; these have no page and are set
as code. A record that cannot be imported, because its module is private, is called by its own name
in titles, links, the index and the search.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.typing import ExtensionMetadata

import torchlift

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_NAME = re.compile(r"(?<![`:\w])`(\w+)`(?!`)")
_PRIVATE = re.compile(r"(?: in )?\btorchlift\._\w+(?:\.[a-z_]\w*)*\.?")


class RecordNames(SphinxTransform):
    """Take the private module out of the names of records, before Sphinx collects them."""

    default_priority = 840

    def apply(self, **kwargs: object) -> None:
        for signature in self.document.findall(addnodes.desc_signature):
            if _PRIVATE.match(signature.get("module") or ""):
                for prefix in list(signature.findall(addnodes.desc_addname)):
                    prefix.parent.remove(prefix)
        for index in self.document.findall(addnodes.index):
            index["entries"] = [
                (kind, _PRIVATE.sub("", text), *rest) for kind, text, *rest in index["entries"]
            ]
        known = self.env.domains.python_domain.objects
        for name in [n for n, to in known.items() if _PRIVATE.match(n) and not to.aliased]:
            # The full name stays, for links: what is aliased is in no search.
            known[_PRIVATE.sub("", name)] = known[name]
            known[name] = known[name]._replace(aliased=True)


class RecordLinks(SphinxPostTransform):
    """Take the private module out of what a link shows below the pointer."""

    default_priority = 900

    def run(self, **kwargs: object) -> None:
        for link in self.document.findall(nodes.reference):
            if "reftitle" in link:
                link["reftitle"] = _PRIVATE.sub("", link["reftitle"])


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.TextElement
) -> nodes.Node | None:
    """Try the spelling that has a page for a torchlift name that has none."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    domain = env.domains.python_domain
    parts = target.removeprefix("torchlift.").split(".")
    if target.startswith("torch."):  # which has a LoadPlan, too
        return None
    for start in range(len(parts)):
        tail = parts[start:]
        if not tail[0][:1].isupper():
            continue
        public = ".".join(["torchlift", *tail])
        if tail[0] not in dir(torchlift):
            suffix = "." + ".".join(tail)
            pages = [
                name
                for name, page in domain.objects.items()
                if f".{name}".endswith(suffix) and not page.aliased
            ]
            if len(pages) != 1:
                continue
            public = pages[0]
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    if _PRIVATE.match(target) and contnode.astext() == parts[-1]:
        return contnode  # a type without a page: otherwise the dotted name would be shown
    return None


def pages_of_records(index: Path) -> dict[str, str]:
    """Name the pages of the records in private modules, as the API index lists them."""
    listed = re.findall(r"^   ~(_\S+\.(\w+))$", index.read_text(encoding="utf-8"), re.MULTILINE)
    return {f"torchlift.{path}": name for path, name in listed}


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
    """Write as Python what is none, and Sphinx would stumble at.

    ``<factory>`` is a dataclass's unnamed default; what takes the arguments of a function that is
    passed comes without the name of its kind.
    """
    if args:
        args = args.replace("<factory>", "...").replace("[[~P]", "[P")
        args = re.sub(r"\*(\w+): ~typing\.~P", r"*\1: P.\1", args)
    return args, ret


def skip_fields(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out "Alias for field number 0": the docstring of a named tuple lists its fields."""
    return True if (obj.__doc__ or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_transform(RecordNames)
    app.add_post_transform(RecordLinks)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-docstring", set_local_names_as_code, priority=400)
    app.connect("autodoc-process-signature", make_signature_readable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
