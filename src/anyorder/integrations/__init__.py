"""Models from elsewhere, read by name."""
