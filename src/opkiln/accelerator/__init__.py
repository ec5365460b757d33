"""The GPUs of this machine, asked without touching them; one file per vendor."""
