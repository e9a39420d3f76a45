"""What people generate with: conversations, JSON lines, prompts from files."""
