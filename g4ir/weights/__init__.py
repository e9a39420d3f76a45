"""Weights: checkpoints, random weights, packed params."""
