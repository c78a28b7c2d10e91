# The same entries here and in CI; each is a script of the same name, which also runs without make.
.PHONY: setup lint test bench check

setup:
	scripts/setup

lint:
	scripts/lint

test:
	scripts/test

bench:
	scripts/bench

check: lint test
