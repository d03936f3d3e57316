"""Decodes from the command line; the same as the installed command `vramjax`."""

from vramjax.cli import main

if __name__ == "__main__":
    main()
