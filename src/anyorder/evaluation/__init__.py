"""Evaluation: the training objectives, repeated on held-out text, with error bars."""
