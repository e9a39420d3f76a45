"""Makes the built artefact, and the tokens that come out of it."""
