"""The terminal and the user's folders: progress, sizes as text, plots, paths."""
