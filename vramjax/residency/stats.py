"""What the residency of layers has cost so far: plain counters, read without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class ResidencyStats:
    """Counters of one controller since it was made. Bytes are those of the arrays, without allocator rounding.

    Invariant: every slot (the device arrays of one layer) that is made counts as a pool miss, so `pool_misses` is the
    number of slots that layers hold or the pool holds, plus `slots_freed`, plus `slots_lost`.

    Example, 3 layers under a cold past window of 1, after 3 sweeps: 3 + 2 + 2 `uploads`, 0 + 1 + 1 `hits`,
    `evictions` as many as uploads less the one layer that is left, 2 `pool_misses` (the peak is 2 layers,
    made in advance) and 7 `pool_hits`.
    """

    uploads: int = 0  # layers copied to the device, those of the warm-up too
    bytes_uploaded: int = 0
    hits: int = 0  # uses of a layer that was not uploaded in the same sweep
    evictions: int = 0  # layers that the schedule took off the device
    pool_hits: int = 0  # uploads into a slot of the pool, made in advance or left by another layer
    pool_misses: int = 0  # slots of new device memory, made in advance or for an upload that found none
    pool_fallback_frees: int = 0  # slots really freed because the pool was full
    slots_freed: int = 0  # slots really freed, for whatever reason, the end included
    slots_lost: int = 0  # slots that a failed upload used up, or that it did not get to make
    sweeps: int = 0  # sweeps that ran to their end
    sweeps_aborted: int = 0  # sweeps that failed or were left early
    last_sweep_uploads: int = 0  # in the last sweep that ran to its end; likewise the next two
    last_sweep_bytes_uploaded: int = 0
    last_sweep_is_steady: bool = False  # not the first one, nor the first after an abort
    resident_layers_end: int = 0  # when the last sweep, or the warm-up, had ended
    resident_arrays_end: int = 0
    peak_resident_layers: int = 0  # layers loading or loaded, at any moment
    peak_device_bytes: int = 0  # those layers and the slots in the pool, at any moment
