"""Evaluation of trained models: perplexities and tasks by their published definitions."""
