"""What a trained model is worth: perplexities and tasks by their published definitions."""
