"""``python -m harli_cli``."""

from harli_cli.main import main

main()
