"""Benchmarks that anybody can run: `anyorder bench`."""
