"""What is decided: what serves an op here, and why. ``decide.decide`` is the one place."""
