"""Packs a checkpoint as Q8 for streaming: `python scripts/convert.py SRC DST`; the same as `vramjax convert`."""

import sys

from vramjax.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
