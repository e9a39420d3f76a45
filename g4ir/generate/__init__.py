"""Front ends of generation: conversations, JSON lines, prompts from files."""
