"""The ground for all other rooms: records, digests, locks, and which files are trusted."""
