"""Text to batches: tokenizers, token files, sample order, blends, and a loader whose only state is a sample count."""
