# Everything runs in .venv; nothing is installed again while pyproject.toml is unchanged.
PYTHON ?= python3
LESSON = .venv/bin/lesson

run: .venv/run.stamp
	$(LESSON) compare naive tiling --budget 45
	$(LESSON) compare naive tiling --budget 45 --model tinyllama-shape --layers 2

test: .venv/test.stamp
	.venv/bin/python -m pytest

report: .venv/plot.stamp
	$(LESSON) report

lint: .venv/test.stamp
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

clean:
	rm -rf .venv build *.egg-info

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/run.stamp: pyproject.toml | .venv/bin/pip
	.venv/bin/pip install --quiet --editable . && touch $@

.venv/plot.stamp: pyproject.toml | .venv/bin/pip
	.venv/bin/pip install --quiet --editable '.[plot]' && touch $@ .venv/run.stamp

.venv/test.stamp: pyproject.toml | .venv/bin/pip
	.venv/bin/pip install --quiet --editable '.[dev]' && touch $@ .venv/run.stamp

.PHONY: run test report lint clean
