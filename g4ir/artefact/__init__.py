"""The directory of a built engine: its record, digests, reading it, and whether to trust it."""
