"""`python -m vramjax`: the same as the installed command."""

from vramjax.cli import main

if __name__ == "__main__":
    main()
