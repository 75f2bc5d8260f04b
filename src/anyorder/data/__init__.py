"""Text to batches: corpora -> tokenizer -> shards -> batches."""
