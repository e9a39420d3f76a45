"""A program as data: graphs, their text form, the verifier, rewrites, the interpreter, and the
comparison of results with a reference."""
