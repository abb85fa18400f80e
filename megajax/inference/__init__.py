"""Generation and scoring of text with trained models."""
