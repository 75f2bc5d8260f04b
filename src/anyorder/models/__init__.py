"""Models: one family of blocks, and what is built from it."""
