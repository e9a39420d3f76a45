"""Bytes and microseconds, known before anything is built."""
