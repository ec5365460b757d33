"""What a training layer does with less precision in its stochastic mode."""
