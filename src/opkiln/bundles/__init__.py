"""Entries as they travel: a layer of shipped entries, one file of them, and signatures."""
