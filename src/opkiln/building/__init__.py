"""How it is built: compile, link, load-test, publish."""
