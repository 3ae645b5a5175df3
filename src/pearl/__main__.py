"""python -m pearl: the command line."""

from pearl.cli import main

main()
