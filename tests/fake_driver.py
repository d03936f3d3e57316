"""libcuda and libnvidia-ml, as far as they are asked."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30
RETAIN, RELEASE = "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"
PUSH, POP = "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"


class FakeDriver:
    """libcuda and libnvidia-ml for one device, which is device 1. Each call may be made to fail; `calls` are all."""

    def __init__(
        self, *, free_bytes: int = 60 * GIB, total_bytes: int = 80 * GIB, kind: str = "GPU", failing: str = ""
    ) -> None:
        self.free_bytes, self.total_bytes, self.kind = free_bytes, total_bytes, kind
        self.failing = failing
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            return 999 if name == self.failing else self._answer(name, args)

        return call

    def _answer(self, name: str, args: tuple[Any, ...]) -> int:
        if name == "cuDeviceGet":
            args[0]._obj.value = 10 + args[1]
        elif name == "cuDeviceTotalMem_v2":
            assert args[1].value == 11
            args[0]._obj.value = self.total_bytes
        elif name == "cuDeviceGetUuid_v2":
            assert args[1].value == 11
            args[0][:] = range(16)
        elif name == RETAIN:
            assert args[1].value == 11
            args[0]._obj.value = 77
        elif name == PUSH:
            assert args[0].value == 77
        elif name == "cuMemGetInfo_v2":
            args[0]._obj.value, args[1]._obj.value = self.free_bytes, self.total_bytes
        elif name == "nvmlDeviceGetHandleByUUID":
            if args[0].decode() != f"{self.kind}-00010203-0405-0607-0809-0a0b0c0d0e0f":
                return 6  # not found
            args[1]._obj.value = 88
        elif name == "nvmlDeviceGetMemoryInfo":
            assert args[0].value == 88
            total_bytes = self.total_bytes + GIB  # it counts what the other library does not
            args[1][:] = (total_bytes, self.free_bytes, total_bytes - self.free_bytes)
        return 0
