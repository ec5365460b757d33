"""Reports on this machine: what works, what does not, and why. Records first, then their forms."""
