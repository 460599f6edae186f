"""Sphinx configuration: pages in docs/, recipes in recipes/, built from the repository's root."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "tools")]

import public_names  # noqa: E402

project = "torchlift"
author = "the torchlift maintainers"
copyright = "the torchlift maintainers"
release = version = importlib.metadata.version("torchlift")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.programoutput",
    "format_tables",
    "markdown_pages",
    "mending",
    "public_names",
    "recipe_cards",
    "recipe_outputs",
    "recipe_pages",
    "recipe_workers",
    "valid_html",
]

# ---- names and links: every single-backtick name is a link, and one that leads nowhere is an error
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    # What has no page on purpose: private types, type variables, the strings of a Literal.
    ("py:.*", r"torchlift\.(\w+\.)*_\w+"),
    ("py:.*", r"torchlift\.(\w+\.)*[A-Z]"),
    ("py:class", r"'.*'"),
    # A base class with its parameters is split at the comma.
    ("py:class", r"collections\.abc\.Mapping\[str"),
    # What torch's own functions return has no page there either.
    ("py:class", r"torch\.nn\.modules\.module\._IncompatibleKeys"),
    ("py:class", r"torch\.distributed\.checkpoint\.planner\.LoadPlan"),
    # matplotlib is installed where a chart is asked for.
    ("py:class", r"Figure"),
    # The types of arguments that are passed on.
    ("py:class", r"typing_extensions\.Unpack|Ts|P(\.args|\.kwargs)?"),
]
# Anchors and alerts as on a forge, for the pages of Markdown.
myst_heading_anchors = 3
myst_enable_extensions = ["alert"]
# Absolute, because autosummary looks below the pages and Sphinx below this file.
templates_path = [str(ROOT / "docs" / "_templates")]
exclude_patterns = [
    "_build",
    "_ext",
    "_includes",
    "_inventories",
    "_static",
    "_templates",
    "api/generated/backreferences",
]


def packed(name: str) -> str:
    """Compress a list in docs/_inventories for intersphinx: no build needs a network."""
    text = ROOT.joinpath("docs", "_inventories", f"{name}.txt").read_bytes()
    head, mark, names = text.partition(b"zlib.\n")
    target = ROOT / "docs" / "_build" / "inventories" / f"{name}.inv"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(head + mark + zlib.compress(names))
    return str(target)


intersphinx_mapping = {
    name: (url, packed(name))
    for name, url in {
        "python": "https://docs.python.org/3/",
        "torch": "https://docs.pytorch.org/docs/stable/",
    }.items()
}

# ---- API pages
autosummary_generate = True
autosummary_ignore_module_all = False
autosummary_imported_members = True
autosummary_filename_map = public_names.pages_of_records(ROOT / "docs" / "api" / "index.rst")
autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True  # the value of torchlift.bench.WAYS fills the screen of a phone
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = True
toc_object_entries_show_parents = "hide"  # the margin is too narrow for dotted names

# ---- what the command prints, as wide as a page, by the command of this environment
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ |= {"COLUMNS": "92", "NO_COLOR": "1"}

# ---- recipes
# A clone may lie below a folder with a blank in its name; that recipes have none, a test checks.
suppress_warnings = ["sphinx_gallery.space_in_filename"]

sphinx_gallery_conf = {
    "examples_dirs": ["../recipes"],
    "gallery_dirs": ["auto_recipes"],
    "filename_pattern": r"[\\/]plot_",
    "ignore_pattern": r"[\\/](?!plot_)[^\\/]*\.py$",
    "within_subsection_order": "FileNameSortKey",
    "backreferences_dir": "api/generated/backreferences",
    "doc_module": ("torchlift",),
    "remove_config_comments": True,
    "reset_modules": ("matplotlib", "gallery_reset.reset"),
    "reset_modules_order": "both",
    "capture_repr": ("_repr_html_", "__repr__"),
    "image_scrapers": ("figures_twice.scrape",),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1e9,
}

# ---- the site
html_theme = "pydata_sphinx_theme"
html_title = "torchlift"
html_static_path = ["docs/_static"]
html_css_files = ["torchlift.css"]
# For notebooks that were downloaded: no index has torchlift.
WHEELS = sorted(ROOT.glob("build/wheel/*.whl"))
html_extra_path = [str(wheel) for wheel in WHEELS]
rst_epilog = ".. |wheel| replace:: its wheel\n"
if WHEELS:
    rst_epilog = f".. |wheel| replace:: `its wheel <{WHEELS[-1].name}>`__\n"
html_favicon = "docs/_static/mark.svg"
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_sidebars = {page: [] for page in ("index", "404", "auto_recipes/index")}
html_theme_options = {
    "logo": {
        "text": "torchlift",
        "image_light": "_static/mark.svg",
        "image_dark": "_static/mark.svg",
    },
    "navbar_align": "left",
    "navbar_center": ["tl-links"],
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "footer_start": ["copyright"],
    "footer_end": ["release"],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-light",
    "pygments_dark_style": "a11y-dark",
    "show_toc_level": 2,
    "back_to_top_button": False,
}
# What a program printed is not for copying.
copybutton_selector = (
    'div[class*="highlight-"]:not(.highlight-none, .highlight-text) pre, div.tl-command pre'
)
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
