"""Benchmarks are run by hand (`make bench-trl`, `make bench-memory`); nothing here is a test."""

collect_ignore_glob = ["*.py"]
