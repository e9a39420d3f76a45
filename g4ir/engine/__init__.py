"""Tokens in, tokens out: sessions, the scheduler, the prefix cache, speculative decoding."""
