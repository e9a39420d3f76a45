"""Front ends of generation: conversations, requests from flags or JSON lines, dumps of values."""
