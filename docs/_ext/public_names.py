"""Links a name to the place where it is documented: ``torchlift.<name>``.

Annotations name a class by the module that defines it, ``torchlift.checkpoint.Checkpoint``. Readers
know the public name only, and only that one has a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sphinx.util.typing import ExtensionMetadata

import torchlift

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.reference | None:
    """Try the public spelling of a torchlift name that has no page under its private one."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    parts = target.split(".")
    if parts[0] == "torchlift":
        parts = parts[1:]
    for start, name in enumerate(parts):
        if name in torchlift.__all__ and name[:1].isupper():
            public = ".".join(["torchlift", *parts[start:]])
            return env.domains.python_domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", public, node, contnode
            )
    return None


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.connect("missing-reference", resolve)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
