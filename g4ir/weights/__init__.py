"""Reads and makes tensors in files and in memory: checkpoints, random weights, packed params."""
