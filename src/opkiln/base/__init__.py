"""What everything stands on: records, digests, locks, who may have written a file."""
