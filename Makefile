# make demo: install fedstill and what it depends on, then train, measure and show three methods.
# make test: install every extra and the tools, too, then run the tests.
PYTHON ?= python3
# Another index or build of torch: make demo PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple"
PIP_ARGS ?=
# uv does not read pip's settings: hand on its folder of wheels, if it has one that exists (uv refuses a missing one).
LINKS = $$(d=$$(.venv/bin/pip config get :env:.find-links 2>/dev/null || .venv/bin/pip config get global.find-links 2>/dev/null); test -d "$$d" && echo "$$d")
INSTALL = UV_FIND_LINKS="$${UV_FIND_LINKS:-$(LINKS)}" VIRTUAL_ENV=.venv .venv/bin/uv pip install -q $(PIP_ARGS) -c constraints.txt
# What make test adds: the tools, and every extra but flower-simulation.
EXTRAS = test,tensorboard,docs,flower,flower-datasets,onnx,tune,mlflow,wandb,text,private,secure

.PHONY: demo test test-latest slow lint docs-check docs-tables house grid scorecard bench bench-peers bench-guard package docs gallery clean

demo: .venv/core
	.venv/bin/fedstill demo

# The tests' own files are in UTF-8, whatever a machine's locale is; tests/cli/test_other_encodings.py has another.
test slow lint scorecard: export PYTHONUTF8 = 1

test: .venv/ready
	unset PYTHONDONTWRITEBYTECODE; .venv/bin/python -m pytest -n auto --dist loadscope --no-loadscope-reorder

# make test-latest: the suite with the newest versions that pyproject.toml allows, in an environment of its own.
test-latest: export PYTHONUTF8 = 1

test-latest: .venv/core
	test -x .venv-latest/bin/python || $(PYTHON) -m venv .venv-latest
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$(LINKS)}" .venv/bin/uv pip install -q --upgrade --python .venv-latest/bin/python $(PIP_ARGS) -e '.[$(EXTRAS)]'
	unset PYTHONDONTWRITEBYTECODE; .venv-latest/bin/python -m pytest -n auto --dist loadscope --no-loadscope-reorder $(ARGS)

slow: .venv/ready
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$(LINKS)}" .venv/bin/python -m pytest -m slow

lint: .venv/ready
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports
	.venv/bin/python tools/house.py --gates
	.venv/bin/python tools/public_api.py
	.venv/bin/python -m tools.docs_lint

# make docs-check: the documentation against its sources; make docs-tables: its generated tables, written anew.
docs-check docs-tables: export PYTHONUTF8 = 1

docs-check: .venv/ready
	.venv/bin/python -m tools.docs_check

docs-tables: .venv/ready
	.venv/bin/python -m tools.docs_check --write

# make grid ROWS=avx2,python: the suite on other processors, numbers of threads, Pythons and the oldest versions; by hand.
grid: .venv/ready
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$(LINKS)}" .venv/bin/python tests/grid.py --pip-args="$(PIP_ARGS)" --rows="$(ROWS)" $(ARGS)

# make house: how readable the code is, in figures by package.   make house ARGS=--lower: lower their ceilings to today's.
house: .venv/ready
	.venv/bin/python tools/house.py $(ARGS)

# make scorecard ARGS="--quick R1 S1": what fedstill promises, measured on this machine; docs/reliability.md has the rows.
scorecard: .venv/ready
	PYTHONPATH="tests$${PYTHONPATH:+:$$PYTHONPATH}" .venv/bin/python -m scorecard $(ARGS)

bench: .venv/ready
	.venv/bin/python -m benchmarks.startup
	.venv/bin/python -m benchmarks.speed

# make bench-peers ARGS="--workloads W4 --pairs 1": fedstill beside other libraries, each in an environment of its own.
bench-peers: .venv/ready
	UV_FIND_LINKS="$${UV_FIND_LINKS:-$(LINKS)}" .venv/bin/python -m benchmarks.peers --pip-args="$(PIP_ARGS)" $(ARGS)

# make bench-guard: start-up, rounds and overhead beside the last release tag; fails if one is 1.05 times as slow.
bench-guard: .venv/ready
	.venv/bin/python -m benchmarks.guard $(ARGS)

# make package: an sdist and a wheel under dist/, checked as the package index does.
package: .venv/core
	$(INSTALL) twine
	rm -rf dist && .venv/bin/uv build -q && .venv/bin/python -m twine check --strict dist/*

docs: .venv/ready
	.venv/bin/mkdocs build --strict

# make gallery: the pictures of docs/gallery.md, from the commands on that page.
gallery: .venv/ready
	.venv/bin/python tools/gallery.py

clean:
	rm -rf .venv .venv-latest build dist site

# Two stamps: core has what the demo needs, ready adds what the tests need.
.venv/core: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -c constraints.txt uv
	$(INSTALL) -e .
	touch .venv/core

.venv/ready: .venv/core
	$(INSTALL) -e '.[$(EXTRAS)]'
	touch .venv/ready
