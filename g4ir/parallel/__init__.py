"""One model on several ranks: which part of each tensor a rank has, and their collectives."""
