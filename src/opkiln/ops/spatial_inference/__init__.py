"""Adds of biases and residuals to images whose channels come last in memory."""
