"""Decodes images, videos and sound with limits, and makes of them what the towers take."""
