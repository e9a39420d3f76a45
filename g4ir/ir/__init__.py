"""A program as data: graphs, their text form, the verifier, the interpreter, and the comparison of
results with a reference."""
