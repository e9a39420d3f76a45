"""Other protocols, translated to the fields of chat completions, and their answer formats."""
