"""Sampling: write tokens in any order."""
