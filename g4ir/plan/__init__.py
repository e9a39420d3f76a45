"""Memory and time estimates before a build."""
