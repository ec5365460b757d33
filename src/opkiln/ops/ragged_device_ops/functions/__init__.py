"""The functions of each library in a module of its own: a process declares those it uses."""
