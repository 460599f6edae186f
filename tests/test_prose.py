"""The lint of the English finds sentences that need two readings, and lets no area get worse."""

from __future__ import annotations

from pathlib import Path

import prose
import pytest

PAGE = """\
Title of the page
=================

.. code-block:: python

   x = 1; y = 2  # Of this, nothing is read; what of those?

A sentence with ``a; b`` in it. torchlift copies the values. What does it cost?

.. admonition:: Danger

   {}

* - X
  - Short; one
"""


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("What a file contains is listed.", "starts with What or Who"),
        ("Whoever writes to it loses the file.", "starts with What or Who"),
        ("Of a set only the index is read.", "starts with Of or Where"),
        ("Where none fits it raises.", "starts with Of or Where"),
        ("It reads two files, of which one wins.", "of which, of whom, of those"),
        ("The value is no tensor of torch.", "is no, has no"),
        ("The first is copied; the second is mapped.", "semicolon"),
        ("word " * 25 + "word.", "more than 25 words"),
    ],
)
@pytest.mark.parametrize("suffix", [".md", ".rst"])
def test_a_bad_sentence_of_a_page_is_found(
    sentence: str, wrong: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also inside of an admonition. The other sentences of the page are not reported."""
    page = tmp_path / f"page{suffix}"
    page.write_text(PAGE.format(sentence) if suffix == ".rst" else f"# Title\n\n{sentence}\n")
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}: {wrong}: {sentence}\n"


def test_one_bad_sentence_more_than_the_ceiling_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the area are printed. One sentence fewer is no error, but is reported."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    page = tmp_path / "docs" / "guide" / "page.rst"
    page.parent.mkdir(parents=True)
    page.write_text("The value is no tensor.\n\nOf these, none is read.\n")
    assert prose.main([], {"docs": 2}) == 0
    assert capsys.readouterr().out == ""
    assert prose.main([], {"docs": 1}) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert prose.main([], {"docs": 3}) == 0
    assert capsys.readouterr().out == "docs: 2 bad sentences, the ceiling is 3\n"
