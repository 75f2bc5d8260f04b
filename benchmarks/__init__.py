"""Measurements that anybody can repeat; each writes its figures to benchmarks/results."""
