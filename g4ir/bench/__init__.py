"""`g4ir bench`: speed with agreement, a roofline and a baseline, all measured in one process."""
