"""What the CUDA driver is asked, and that everything that was taken for it is given back."""

from __future__ import annotations

from typing import Any

import pytest
from fake_driver import GIB, POP, PUSH, RELEASE, RETAIN, FakeDriver

from vramjax import cuda_driver


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(free_bytes=600, total_bytes=1000)
    monkeypatch.setattr(cuda_driver, "_load_cuda", lambda: fake)
    return fake


def test_the_driver_is_asked_about_one_device(cuda: FakeDriver) -> None:
    assert cuda_driver.driver_free_bytes(1) == 600
    assert cuda.calls == ["cuInit", "cuDeviceGet", RETAIN, PUSH, "cuMemGetInfo_v2", POP, RELEASE]
    assert cuda_driver.driver_free_bytes(None) is None


def test_all_streams_of_one_device_are_waited_for(cuda: FakeDriver) -> None:
    cuda_driver.synchronize(1)
    assert cuda.calls == ["cuInit", "cuDeviceGet", RETAIN, PUSH, "cuCtxSynchronize", POP, RELEASE]
    cuda_driver.synchronize(None)
    assert cuda.calls[7:] == []


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", RETAIN, PUSH, "cuCtxSynchronize"])
def test_a_broken_device_is_not_waited_for(cuda: FakeDriver, failing: str) -> None:
    cuda.failing = failing
    cuda_driver.synchronize(1)
    assert ("cuCtxSynchronize" in cuda.calls) == (failing == "cuCtxSynchronize")
    assert (PUSH in cuda.calls and failing != PUSH) == (POP in cuda.calls)


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", RETAIN, PUSH, "cuMemGetInfo_v2"])
def test_a_driver_that_fails(cuda: FakeDriver, failing: str) -> None:
    """Whatever was taken is given back."""
    cuda.failing = failing
    assert cuda_driver.driver_free_bytes(1) is None
    assert (RETAIN in cuda.calls and failing != RETAIN) == (RELEASE in cuda.calls)
    assert (PUSH in cuda.calls and failing != PUSH) == (POP in cuda.calls)


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("", (60 * GIB, 80 * GIB)),
        *((name, None) for name in ("cuInit", "cuDeviceGet", "cuDeviceTotalMem_v2")),
        *((name, (None, 80 * GIB)) for name in ("cuDeviceGetUuid_v2", "nvmlInit_v2", "nvmlDeviceGetHandleByUUID")),
        ("nvmlDeviceGetMemoryInfo", (None, 80 * GIB)),
    ],
)
@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, failing: str, expected: Any, kind: str) -> None:
    driver = FakeDriver(kind=kind, failing=failing)
    monkeypatch.setattr(cuda_driver, "_load_cuda", lambda: driver)
    monkeypatch.setattr(cuda_driver, "_load_nvml", lambda: driver)
    assert cuda_driver.driver_memory(1) == expected
    # No context, which would take memory, and nothing left open.
    assert not any("Ctx" in name for name in driver.calls)
    assert ("nvmlInit_v2" in driver.calls and failing != "nvmlInit_v2") == ("nvmlShutdown" in driver.calls)


@pytest.mark.parametrize("library", ["_load_cuda", "_load_nvml"])
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    def missing() -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "_load_cuda", FakeDriver)
    monkeypatch.setattr(cuda_driver, library, missing)
    assert cuda_driver.driver_memory(1) == (None if library == "_load_cuda" else (None, 80 * GIB))
