"""Host memory for JAX to adopt in place: the C structs of DLPack, which numpy does not offer for pinned memory.

Knows one numpy array and which GPU may read it; not how it came to be pinned.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CUDA_HOST = 3  # kDLCUDAHost: pinned host memory, at the same address for the host and for the GPU

# DLDataTypeCode by numpy's kind, or by name for the types that numpy does not have itself.
_CODE_OF_KIND = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_CODE_OF_NAME = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_UNUSED = b"dltensor"  # the name of a capsule that nobody has consumed


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # NULL: row-major and dense
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# Functions of Python's C interface, with types of our own: those in `ctypes.pythonapi` are everybody's.
_take_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


_EXPORTS: dict[int, _Export] = {}  # by the address of their structs: those that have a consumer, or may get one

# The deleter of every `DLManagedTensor`: the consumer needs it no more. It runs in whatever thread the consumer likes,
# and is code in C, which an interrupt does not break off: the consumer would not call again.
_delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_EXPORTS.pop)


# It uses no global names: capsules may outlive this module's when Python exits.
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete_unused(
    capsule: int,
    _is_valid: Any = _capsule_is_valid,
    _pointer: Any = _capsule_pointer,
    _unused: bytes = _UNUSED,
    _delete: Any = _delete,
) -> None:
    """The destructor of every capsule. Who has consumed one has renamed it, and calls the deleter in due time."""
    if _is_valid(capsule, _unused):
        _delete(_pointer(capsule, _unused))


for _callback in (_delete, _delete_unused):
    _take_reference(_callback)  # for good: C code may call them as long as the process lives


class _Export:
    """One capsule's structs and all that they point to, which live until the structs are deleted."""

    def __init__(self, array: np.ndarray, device_type: int, device_id: int, owner: object) -> None:
        self.owner = (array, owner)
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        tensor = _DLTensor(
            data=array.ctypes.data,
            device=_DLDevice(device_type, device_id),
            ndim=array.ndim,
            dtype=_DLDataType(_code(array.dtype), array.dtype.itemsize * 8, 1),
            shape=self.shape,
        )
        deleter = ctypes.cast(_delete, ctypes.c_void_p)
        self.managed = _DLManagedTensor(dl_tensor=tensor, manager_ctx=None, deleter=deleter)


class PinnedArray:
    """A numpy array as `from_dlpack` takes it: pinned host memory of one GPU.

    Invariant: `array` and `owner` live at least until the consumer of the last capsule has called its deleter, for JAX
    until the array that it made is deleted and no longer used, and not longer than that because of a capsule.

    Example: `jax.dlpack.from_dlpack(PinnedArray(view, 1, owner=memory), copy=False)` is a JAX array in the
    "pinned_host" memory of the GPU whose `local_hardware_id` is 1, at the address of `view`.
    """

    def __init__(
        self, array: np.ndarray, device_id: int, *, owner: object = None, device_type: int = CUDA_HOST
    ) -> None:
        """Takes a row-major, dense array whose memory is pinned for the GPU.

        Raises:
          ValueError: DLPack has no name for its dtype.
        """
        assert array.flags.c_contiguous
        _code(array.dtype)
        self._array, self._owner = array, owner
        self._device = (device_type, device_id)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: object = None) -> Any:
        """A new capsule. Nothing writes to the array in any stream, so there is nothing to wait for."""
        del stream
        export = _Export(self._array, *self._device, self._owner)
        address = ctypes.addressof(export.managed)
        _EXPORTS[address] = export
        return _new_capsule(address, _UNUSED, ctypes.cast(_delete_unused, ctypes.c_void_p))


def _code(dtype: np.dtype) -> int:
    code = _CODE_OF_NAME.get(dtype.name, _CODE_OF_KIND.get(dtype.kind))
    if code is None:
        raise ValueError(f"DLPack has no name for {dtype}")
    return code
