"""Small ops that tests build, and what it takes to build them here and in other processes."""
