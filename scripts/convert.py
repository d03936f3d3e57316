"""Packs a checkpoint as Q8 for streaming: `python scripts/convert.py SRC DST`; the same as `vramjax convert`."""

import sys

from vramjax.__main__ import run

if __name__ == "__main__":
    run(["convert", *sys.argv[1:]])
