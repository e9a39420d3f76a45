"""Decodes images, videos and audio within limits, and preprocesses them for the towers."""
