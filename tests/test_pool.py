import numpy as np
import pytest

from vramjax.errors import ConfigError
from vramjax.residency.geometry import Geometry, geometry_of
from vramjax.residency.pool import Pool

WIDE = Geometry("tree", (((4, 8), np.dtype(np.int8)), ((4,), np.dtype(np.float32))))
NARROW = Geometry("tree", (((4, 4), np.dtype(np.int8)), ((4,), np.dtype(np.float32))))


def test_geometry_is_what_must_be_equal_for_memory_to_be_shared() -> None:
    layer = {"w": np.zeros((4, 8), np.int8), "s": np.ones(4, np.float32)}
    geometry = geometry_of(layer)
    assert geometry.arrays == (((4,), np.dtype(np.float32)), ((4, 8), np.dtype(np.int8)))
    assert (geometry.num_arrays, geometry.num_bytes) == (2, 48)
    same = {"s": np.zeros(4, np.float32), "w": np.ones((4, 8), np.int8)}
    assert geometry_of(same) == geometry
    assert hash(geometry_of(same)) == hash(geometry)
    for other in (
        {"w": np.zeros((8, 4), np.int8), "s": np.ones(4, np.float32)},  # as many bytes
        {"w": np.zeros((4, 8), np.uint8), "s": np.ones(4, np.float32)},
        {"v": np.zeros((4, 8), np.int8), "s": np.ones(4, np.float32)},
        (np.ones(4, np.float32), np.zeros((4, 8), np.int8)),
    ):
        assert geometry_of(other) != geometry


def test_take_and_give() -> None:
    pool = Pool(cap=2)
    assert pool.take(WIDE) is None
    assert pool.give(WIDE, "a")
    assert (pool.num_slots, pool.num_bytes) == (1, 48)
    assert pool.take(WIDE) == "a"
    assert pool.take(WIDE) is None
    assert (pool.hits, pool.misses, pool.fallback_frees) == (1, 2, 0)
    assert (pool.num_slots, pool.num_bytes) == (0, 0)


def test_geometries_do_not_mix_but_share_the_cap() -> None:
    pool = Pool(cap=2)
    assert pool.give(WIDE, "wide")
    assert pool.give(NARROW, "narrow")
    assert not pool.give(WIDE, "one too many")
    assert (pool.num_slots, pool.num_bytes, pool.fallback_frees) == (2, 48 + 32, 1)
    assert pool.take(NARROW) == "narrow"
    assert pool.take(NARROW) is None
    assert pool.take(WIDE) == "wide"


def test_a_cap_of_0_refuses_everything() -> None:
    pool = Pool(cap=0)
    assert not pool.give(WIDE, "a")
    assert pool.take(WIDE) is None
    assert pool.fallback_frees == 1


def test_drain_hands_everything_over_and_keeps_the_counters() -> None:
    pool = Pool()
    assert pool.cap == 128
    pool.take(WIDE)
    pool.give(WIDE, "a")
    pool.give(NARROW, "b")
    pool.give(WIDE, "c")
    assert sorted(pool.drain()) == ["a", "b", "c"]
    assert pool.drain() == []
    assert (pool.num_slots, pool.num_bytes, pool.misses) == (0, 0, 1)
    assert pool.take(WIDE) is None


@pytest.mark.parametrize("cap", [-1, 1.5, None, "8"])
def test_bad_cap(cap) -> None:
    with pytest.raises(ConfigError, match=rf"the pool's cap is {cap!r}; expected .*0 or more"):
        Pool(cap)
