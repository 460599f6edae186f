"""``.. command-help:: inspect``: what the command prints of itself, taken from the program."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from torchlift.cli import main


class CommandHelp(Directive):
    """The help of one command, or of torchlift itself."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        # argparse asks the terminal how wide to print, and Python 3.14 for colours.
        settings = mock.patch.dict(os.environ, {"COLUMNS": "92", "NO_COLOR": "1"})
        with settings, contextlib.redirect_stdout(io.StringIO()) as printed:
            status = main([*self.arguments, "--help"])
        if status:
            raise self.error(f"torchlift {self.arguments[0]} --help: status {status}")
        typed = " ".join(["$ torchlift", *self.arguments, "--help"])
        return [nodes.literal_block(text=f"{typed}\n{printed.getvalue()}", language="text")]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_directive("command-help", CommandHelp)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
