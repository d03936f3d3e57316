"""Schedules are data: asserted op by op where they are small, by closed forms everywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_process import run_python

from vramjax.errors import ConfigError
from vramjax.residency.policy import (
    Load,
    Op,
    Release,
    Schedule,
    Use,
    both_sides_window,
    past_window,
    pinned_ring,
    resident,
    window,
)


def ops(text: str) -> tuple[Op, ...]:
    """`ops("L0 U0 R0")`: load 0, use 0, release 0."""
    kinds = {"L": Load, "U": Use, "R": Release}
    return tuple(kinds[word[0]](int(word[1:])) for word in text.split())


def numbers(schedule: Schedule) -> tuple[int, ...]:
    return (
        schedule.warm_up_uploads,
        schedule.first_sweep_uploads,
        schedule.uploads_per_sweep,
        schedule.peak_resident_layers,
        schedule.end_resident_layers,
    )


EXACT = {
    "ring 3 of 4 warm": (
        pinned_ring(4, 3, ring=2, warm=True),
        "L3 L0 L1",
        "U0 R0 L2 U1 R1 L0 U2 R2 L1 U3",
        "U0 R0 L2 U1 R1 L0 U2 R2 L1 U3",
    ),
    "ring 3 of 4 cold": (
        pinned_ring(4, 3, ring=2),
        "",
        "L0 L1 U0 R0 L2 U1 R1 L0 U2 R2 L1 L3 U3",
        "U0 R0 L2 U1 R1 L0 U2 R2 L1 U3",
    ),
    "ring 1 of 2": (pinned_ring(2, 1), "", "L0 U0 R0 L1 U1 R1 L0", "U0 R0 L1 U1 R1 L0"),
    "resident warm": (resident(2), "L0 L1", "U0 U1", "U0 U1"),
    "resident cold": (resident(2, warm=False), "", "L0 U0 L1 U1", "U0 U1"),
    "past 1 of 3": (past_window(3, 1), "", "L0 U0 R0 L1 U1 R1 L2 U2", "L0 U0 R0 L1 U1 R1 U2"),
    "past 1 of 3 warm": (
        past_window(3, 1, warm=True),
        "L2",
        "L0 U0 R0 L1 U1 R1 U2",
        "L0 U0 R0 L1 U1 R1 U2",
    ),
    "past 2 of 3": (past_window(3, 2), "", "L0 U0 L1 U1 R0 L2 U2", "L0 U0 U1 R0 U2"),
    "past 2 of 5": (
        past_window(5, 2),
        "",
        "L0 U0 L1 U1 R0 L2 U2 R1 L3 U3 R2 L4 U4",
        "L0 U0 L1 U1 R0 L2 U2 R1 U3 R2 U4",
    ),
    "both sides 1 of 3": (
        both_sides_window(3, 1),
        "",
        "L0 U0 R0 L1 U1 R1 L2 U2",
        "R2 L0 U0 R0 L1 U1 R1 L2 U2",
    ),
    "both sides 2 of 4": (
        both_sides_window(4, 2),
        "",
        "L0 U0 L1 U1 R0 L2 U2 R1 L3 U3",
        "R2 R3 L0 U0 L1 U1 R0 L2 U2 R1 L3 U3",
    ),
    "both sides 2 of 3 warm": (
        both_sides_window(3, 2, warm=True),
        "L1 L2",
        "R1 R2 L0 U0 L1 U1 R0 L2 U2",
        "R1 R2 L0 U0 L1 U1 R0 L2 U2",
    ),
}


def steps(schedule: Schedule) -> list[list[int]]:
    """Of the loads before, in the first and in each later sweep."""
    parts = (schedule.warm_up, schedule.first_sweep, schedule.steady_sweep)
    return [[op.steps for op in part if isinstance(op, Load)] for part in parts]


def test_an_upload_has_the_steps_until_the_next_one_or_until_its_own_layers() -> None:
    assert steps(pinned_ring(4, 3, ring=2, warm=True)) == [[0, 0, 0], [1, 1, 2], [1, 1, 2]]
    assert steps(pinned_ring(4, 3, ring=2)) == [[], [0, 1, 1, 1, 0, 0], [1, 1, 2]]
    assert steps(pinned_ring(8, 6, ring=1, warm=True)) == [[0] * 6, [1, 2, 2], [1, 2, 2]]
    assert steps(past_window(3, 1)) == [[], [0, 0, 0], [0, 0]]  # its own is the next
    assert steps(resident(3)) == [[0, 0, 0], [], []]


@pytest.mark.parametrize(("schedule", "warm_up", "first", "steady"), EXACT.values(), ids=EXACT)
def test_exact_schedules(schedule: Schedule, warm_up: str, first: str, steady: str) -> None:
    assert schedule.warm_up == ops(warm_up)
    assert schedule.first_sweep == ops(first)
    assert schedule.steady_sweep == ops(steady)


@pytest.mark.parametrize("num_layers", range(1, 13))
@pytest.mark.parametrize("warm", [False, True])
def test_closed_forms(num_layers: int, warm: bool) -> None:
    for keep in range(1, num_layers):
        past = past_window(num_layers, keep, warm=warm)
        both = both_sides_window(num_layers, keep, warm=warm)
        assert (past.name, past.keep, both.name, both.keep) == ("past", keep, "both_sides", keep)
        assert past.uploads_per_sweep == num_layers - keep
        assert past.peak_resident_layers == min(num_layers, 2 * keep)
        assert both.uploads_per_sweep == num_layers
        assert both.peak_resident_layers == keep
        for schedule in (past, both):
            assert schedule.end_resident_layers == keep
            assert schedule.releases
            if warm:
                assert schedule.warm_up_uploads == keep
                assert schedule.first_sweep == schedule.steady_sweep
            else:
                assert schedule.warm_up_uploads == 0
                assert schedule.first_sweep_uploads == num_layers


@pytest.mark.parametrize(
    ("keep", "uploads", "peak"),
    [(27, 1, 28), (26, 2, 28), (20, 8, 28), (12, 16, 24), (4, 24, 8), (1, 27, 2)],
)
def test_28_layers_at_the_published_settings(keep: int, uploads: int, peak: int) -> None:
    assert numbers(past_window(28, keep)) == (0, 28, uploads, peak, keep)
    assert numbers(past_window(28, keep, warm=True)) == (keep, uploads, uploads, peak, keep)
    assert numbers(both_sides_window(28, keep)) == (0, 28, 28, keep, keep)
    assert numbers(both_sides_window(28, keep, warm=True)) == (keep, 28, 28, keep, keep)


def test_everything_resident() -> None:
    assert numbers(resident(28)) == (28, 0, 0, 28, 28)
    assert numbers(resident(28, warm=False)) == (0, 28, 0, 28, 28)
    assert not resident(28).releases


@pytest.mark.parametrize("policy", [past_window, both_sides_window, pinned_ring])
@pytest.mark.parametrize("warm", [False, True])
def test_a_window_that_holds_every_layer_is_resident(policy, warm: bool) -> None:
    for keep in (5, 6, 100):
        assert policy(5, keep, warm=warm) == resident(5, warm=warm)
    assert policy(5, 5).name == "resident"
    assert policy(1, 1) == resident(1, warm=False)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 22), st.booleans(), st.sampled_from([past_window, both_sides_window]))
def test_the_rule_holds_at_every_layer(num_layers: int, keep: int, warm: bool, policy) -> None:
    """Replays sweeps with sets, independently of the module's own simulation."""
    schedule = policy(num_layers, keep, warm=warm)
    present: set[int] = {op.layer_idx for op in schedule.warm_up}
    assert all(isinstance(op, Load) for op in schedule.warm_up)
    peak = len(present)
    for sweep in (schedule.first_sweep, schedule.steady_sweep, schedule.steady_sweep, schedule.steady_sweep):
        for op in sweep:
            if isinstance(op, Load):
                assert op.layer_idx not in present
                present.add(op.layer_idx)
            elif isinstance(op, Release):
                present.remove(op.layer_idx)
            else:
                cur = op.layer_idx
                assert cur in present
                assert all(layer_idx > cur - keep for layer_idx in present) or keep >= num_layers
                if schedule.name == "both_sides":
                    assert max(present) == cur
            peak = max(peak, len(present))
        assert len(present) == schedule.end_resident_layers
    assert peak == schedule.peak_resident_layers


def test_peak_slots_per_kind() -> None:
    assert resident(6).peak_slots("aabbbb") == {"a": 2, "b": 4}
    # 2 of "a" come and go before the first "b"; the tail of the sweep before is two of "b".
    assert past_window(6, 2).peak_slots("aaabbb") == {"a": 2, "b": 3}
    assert both_sides_window(6, 2).peak_slots("ababab") == {"a": 1, "b": 1}
    assert past_window(6, 2).peak_slots([0] * 6) == {0: 4}
    with pytest.raises(ValueError, match="5 kinds were given for 6 layers"):
        resident(6).peak_slots("aaaaa")


def test_describe() -> None:
    assert past_window(3, 1).describe().splitlines() == [
        "past, keep 1 of 3 layers: 2 uploads per sweep (3 up to the end of the first), "
        "at most 2 layers on the device, 1 between sweeps",
        "  load 0, use 0",
        "  release 0, load 1, use 1",
        "  release 1, use 2",
    ]


@pytest.mark.parametrize("policy", [past_window, both_sides_window, pinned_ring])
@pytest.mark.parametrize("keep", [0, -1, 1.0, "2", None, True])
def test_bad_keep(policy, keep) -> None:
    with pytest.raises(ConfigError, match=rf"^keep is {keep!r}; expected .*at least 1"):
        policy(4, keep)


@pytest.mark.parametrize("num_layers", [0, -3, 2.5])
def test_bad_num_layers(num_layers) -> None:
    for policy in (resident, lambda n: past_window(n, 1), lambda n: both_sides_window(n, 1)):
        with pytest.raises(ConfigError, match=rf"^num_layers is {num_layers}; expected"):
            policy(num_layers)


@pytest.mark.parametrize(
    ("warm_up", "first", "steady", "message"),
    [
        ("", "L0 U0 U1", "U0 U1", "'use 1' comes when layer 1 is absent"),
        ("L0", "L0 U0 L1 U1", "U0 U1", "'load 0' comes when layer 0 is already present"),
        ("", "R1 L0 U0 L1 U1", "U0 U1", "'release 1' comes when layer 1 is absent"),
        ("", "L0 U0 L1 U1 L2", "U0 U1", "'load 2' names a layer outside 0 ... 1"),
        ("", "L0 U0", "U0 U1", r"first_sweep uses layers \[0\], expected \[0, 1\]"),
        ("L0 U0", "U0 L1 U1", "U0 U1", r"warm_up uses layers \[0\], expected \[\]"),
        ("", "L0 L1 U1 U0", "U0 U1", r"first_sweep uses layers \[1, 0\], expected \[0, 1\]"),
        ("", "L0 U0 L1 U1", "U0 U1 R0", r"begins with layers \[0, 1\] and ends with \[1\]"),
    ],
)
def test_an_impossible_schedule_cannot_be_built(warm_up: str, first: str, steady: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(
            name="test",
            num_layers=2,
            keep=2,
            warm_up=ops(warm_up),
            first_sweep=ops(first),
            steady_sweep=ops(steady),
        )


def test_prefetch_is_a_load_that_stands_earlier() -> None:
    """A schedule may load ahead, also over the end of a sweep, and nothing but data has to change."""
    schedule = Schedule(
        name="ahead",
        num_layers=3,
        keep=1,
        warm_up=ops("L0"),
        first_sweep=ops("L1 U0 R0 L2 U1 R1 L0 U2 R2"),
        steady_sweep=ops("L1 U0 R0 L2 U1 R1 L0 U2 R2"),
    )
    assert numbers(schedule) == (1, 3, 3, 2, 1)
    assert schedule.describe().endswith("  release 1, load 0, use 2\n  release 2")


def test_importing_the_policies_does_not_import_jax() -> None:
    code = "import sys, vramjax.residency.policy; print('jax' in sys.modules, 'numpy' in sys.modules)"
    assert run_python(code).split() == ["False", "False"]


@pytest.mark.parametrize("num_layers", range(1, 13))
@pytest.mark.parametrize("warm", [False, True])
def test_a_pinned_ring_uploads_what_its_ring_must(num_layers: int, warm: bool) -> None:
    for keep in range(1, num_layers):
        for ring in (1, 2, 3):
            schedule, slots = pinned_ring(num_layers, keep, ring=ring, warm=warm), min(ring, keep)
            assert schedule.uploads_per_sweep == num_layers - keep + slots
            assert schedule.peak_resident_layers == schedule.end_resident_layers == keep
            assert schedule.warm_up_uploads == (keep if warm else 0)
            assert schedule.first_sweep_uploads == (schedule.uploads_per_sweep if warm else num_layers + slots)
            assert schedule.peak_slots([0] * num_layers) == {0: keep}


def test_a_pinned_ring_at_the_published_peak() -> None:
    """At a peak of 24 of 28 layers: 6 uploads, where the past window with that peak has 16."""
    assert (pinned_ring(28, 24, ring=2).uploads_per_sweep, pinned_ring(28, 24).peak_resident_layers) == (6, 24)
    assert (past_window(28, 12).uploads_per_sweep, past_window(28, 12).peak_resident_layers) == (16, 24)


def test_streamed_layers_lie_evenly_and_are_loaded_ahead() -> None:
    schedule = pinned_ring(28, 24, ring=2)
    assert schedule.streamed_layers == (0, 4, 9, 14, 18, 23)
    loads = [op.layer_idx for op in schedule.steady_sweep if isinstance(op, Load)]
    assert sorted(loads) == [0, 4, 9, 14, 18, 23]
    order = list(schedule.steady_sweep) * 2
    for layer_idx in loads:  # at least one other streamed layer is used between a load and the use of it
        between = order[order.index(Load(layer_idx)) : order.index(Use(layer_idx), order.index(Load(layer_idx)))]
        assert sum(isinstance(op, Use) and op.layer_idx in loads for op in between) == 1


def test_windows_by_name() -> None:
    assert window(6, 2) == window(6, 2, "pinned_ring") == pinned_ring(6, 2, warm=True)
    assert window(6, 2, warm=False) == pinned_ring(6, 2)
    assert window(6, 2, "past", warm=True) == past_window(6, 2, warm=True)
    assert window(6, 2, "past") == past_window(6, 2)
    assert window(6, None) == window(6, 6, "pinned_ring") == resident(6)
    assert window(6, 9, warm=False) == resident(6, warm=False)
    with pytest.raises(ConfigError, match="keep is 0; expected at least 1"):
        window(6, 0)
    with pytest.raises(ConfigError, match="policy is 'ahead'; expected one of past, both_sides, pinned_ring"):
        window(6, None, "ahead")


def test_a_pinned_ring_is_warm_if_that_saves_reading_ahead() -> None:
    """Only what stays for good is worth it: with all layers in the ring the first sweep would read them anyway."""
    assert pinned_ring(9, 3, ring=2, warm=None) == pinned_ring(9, 3, ring=2, warm=True)
    assert pinned_ring(9, 2, ring=2, warm=None) == pinned_ring(9, 2, ring=2, warm=False)
    assert window(12, 2) == pinned_ring(12, 2, ring=2)
    assert pinned_ring(9, 9, warm=None) == resident(9)


def test_the_ring_is_short_when_few_layers_are_streamed() -> None:
    for num_layers, keep, ring in ((36, 35, 1), (36, 29, 1), (36, 28, 2), (36, 2, 2), (36, 1, 1), (5, 2, 1)):
        assert pinned_ring(num_layers, keep) == pinned_ring(num_layers, keep, ring=ring)
        assert pinned_ring(num_layers, keep).uploads_per_sweep == num_layers - keep + ring
