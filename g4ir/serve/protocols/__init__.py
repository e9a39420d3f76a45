"""The protocols besides chat completions, as translations onto its fields, and the parts that
answers are written in."""
