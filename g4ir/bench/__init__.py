"""`g4ir bench`: speed of engines and baselines, agreement of their outputs, and the roofline, all
measured in one process."""
