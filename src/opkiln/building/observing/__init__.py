"""What the steps of a build read, looked for, wrote and started, told by the system itself."""
