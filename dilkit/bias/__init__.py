"""Scores that know positions: what is added to a score, as a function of where query and key are."""
