"""A program as data: graphs, their text form, the interpreter, differences."""
