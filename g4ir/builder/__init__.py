"""From options to an engine's directory, and from there to an engine, a library, an export."""
