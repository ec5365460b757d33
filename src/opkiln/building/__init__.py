"""How an op is built: compile, link, load-test, publish."""
