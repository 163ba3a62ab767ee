# Everything from a fresh clone, each target by itself. Needs Python >= 3.12 and a C compiler.
#
#   make demo   train one small model on real text in four ways, print and draw the result
#   make test   run every test; ARGS='-k resume' runs some
#   make lint   ruff and mypy
#   make setup  make .venv (or use the active environment) and install into it
#   make clean  remove what setup and the tools made; runs/ stays
#
#   PYTHON=/path/to/python3.12   the Python to make .venv from
#   TORCH=torch==2.13.0          the torch to install where Python has none with CUDA
#   FRESH=1                      demo: train anew, earlier runs are kept aside
#   ARGS='...'                   more flags for the demo or for pytest

VENV := $(or $(VIRTUAL_ENV),.venv)
TORCH := torch==2.13.0
PYTHON :=
FRESH :=
ARGS :=

.PHONY: demo test lint setup clean help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

setup:
	@VENV='$(VENV)' PYTHON='$(PYTHON)' TORCH='$(TORCH)' sh tools/setup.sh

demo: setup
	@'$(VENV)/bin/python' -m megatron_d3 demo $(if $(FRESH),--fresh) $(ARGS)

test: setup
	'$(VENV)/bin/python' -m pytest $(ARGS)

lint: setup
	'$(VENV)/bin/python' -m ruff check .
	'$(VENV)/bin/python' -m mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f megatron_d3/plan/_*.so megatron_d3/influence/_*.so megatron_d3/influence/solvers/_*.so
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
