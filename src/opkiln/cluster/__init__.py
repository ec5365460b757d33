"""All ranks of a job: one build per op, and one library that all of them agree on."""
