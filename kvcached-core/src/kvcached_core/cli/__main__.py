"""``python -m kvcached_core.cli``: the command of the very Python that runs an engine."""

from kvcached_core.cli import main

main()
