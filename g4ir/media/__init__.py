"""Decodes images, videos and audio with limits, and makes of them what the towers take."""
