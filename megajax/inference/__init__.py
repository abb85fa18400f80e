"""Generating and scoring text with trained models."""
