"""Builds, loads, caches and exports engines."""
