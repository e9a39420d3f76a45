"""Plans bytes and microseconds before anything is built."""
