"""The processes of an engine of several ranks: rank 0 leads, the others follow."""
