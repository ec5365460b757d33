"""What works on this machine, what does not, and why: collected as records, shown as text."""
