"""Verification: compares an engine with references, and locates the first difference."""
