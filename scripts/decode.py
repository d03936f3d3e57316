"""Decodes from the command line; the same as the installed command `vramjax`."""

from vramjax.__main__ import run

if __name__ == "__main__":
    run()
