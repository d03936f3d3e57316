"""Bytes for people. GiB and MiB are powers of two, and memory and disks are always counted in them here."""


def gib(num_bytes: float) -> str:
    """Bytes as GiB, or as MiB below one GiB. Example: 1.5 * 2**30 is "1.50 GiB", 3 << 20 is "3.0 MiB"."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
