"""``opkiln ninja``: ninja, in front of the store. ``front.py`` starts it, with a library preloaded
(``hook.c``) that asks a server (``server.py``) before a command is started."""
