"""Execute recipes in one process per core. A cell that measures seconds runs alone.

Sphinx-gallery executes one recipe after the other, and most cells use one core. Here forked workers
execute all recipes, and sphinx-gallery waits for the results in its own order. A cell needs one
token, and there is one token per core. A cell that measures seconds takes all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import wraps
from logging import LogRecord
from pathlib import Path
from typing import Any, NamedTuple

from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.typing import ExtensionMetadata
from sphinx_gallery import gen_rst

_logger = logging.getLogger(__name__)
#: Of a script that uses a clock, cells that may measure, or that print seconds.
CLOCK = re.compile(r"perf_counter|timeit|\.seconds\b")
MEASURES = re.compile(r"\b(in_child|memory|on_ranks|perf_counter|repeat|timeit)\(|f\} s\b")
#: The most workers. Half of the time one recipe measures alone, so more would only take memory.
MOST = 4


class Made(NamedTuple):
    """What a worker returns of a recipe: the result for sphinx-gallery, and what was logged."""

    result: Any
    logs: list[LogRecord]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    if sys.platform == "linux" and (cores := min(len(os.sched_getaffinity(0)), MOST)) > 1:
        gen_rst.execute_code_block = with_tokens(gen_rst.execute_code_block, cores)
        gen_rst.generate_file_rst = in_workers(gen_rst.generate_file_rst, cores)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def measures_seconds(script: str, cell: str) -> bool:
    """Whether a cell may measure seconds, which work in another process would change."""
    return bool(CLOCK.search(script) and MEASURES.search(cell))


def with_tokens(execute: Callable[..., str], cores: int) -> Callable[..., str]:
    """Return sphinx-gallery's function that executes a cell, with a token or with all of them."""
    context = multiprocessing.get_context("fork")
    tokens, turn = context.Semaphore(cores), context.Lock()

    @wraps(execute)
    def waits(compiler: Any, block: Any, names: Any, script: dict[str, Any], *rest: Any) -> str:
        if block.type == "text" or not script["execute_script"]:
            return execute(compiler, block, names, script, *rest)
        text = Path(script["src_file"]).read_text(encoding="utf-8")
        wanted = cores if measures_seconds(text, block.content) else 1
        with turn:  # a cell that waits for all tokens is not overtaken
            for _ in range(wanted):
                tokens.acquire()
        try:
            return execute(compiler, block, names, script, *rest)
        finally:
            for _ in range(wanted):
                tokens.release()

    return waits


def in_workers(generate: Callable[..., Any], cores: int) -> Callable[..., Any]:
    """Return sphinx-gallery's function that executes a recipe. Its first call starts all recipes.

    Sphinx-gallery can execute recipes in parallel too, but it waits at the end of each chapter, and
    its workers are new interpreters, which import everything again.
    """
    found: dict[str, Future[Made]] = {}

    def start(pages: Path, recipes: Path, conf: dict[str, Any]) -> None:
        def make(script: Path) -> Made:
            folder = pages / script.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            collector = logging.LogCollector()
            with collector.collect():
                result = generate(script.name, folder, script.parent, conf)
            logging.convert_serializable(collector.logs)
            return Made(result, collector.logs)

        global _make
        _make = make  # which the workers inherit
        context = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(cores, context)
        # The last chapter has the longest recipes.
        for script in sorted(recipes.glob("*/plot_*.py"), reverse=True):
            found[os.path.normpath(script)] = pool.submit(_make_in_worker, script)
        pool.shutdown(wait=False)

    @wraps(generate)
    def waits(name: str, target: Path, source: Path, conf: dict[str, Any]) -> Any:
        if not found:
            start(Path(target).parent, Path(source).parent, conf)
        made = found[os.path.normpath(Path(source, name))].result()
        for record in made.logs:
            _logger.handle(record)
        return made.result

    return waits


_make: Callable[[Path], Made]


def _make_in_worker(script: Path) -> Made:
    return _make(script)
