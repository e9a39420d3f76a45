"""How far two computations lie apart, and where it began."""
