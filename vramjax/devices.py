"""Which devices a model is put on."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from vramjax.errors import ConfigError
from vramjax.whole_number import is_whole


def choose_devices(devices: Sequence[int | jax.Device] | None, *, name: str = "devices") -> list[jax.Device]:
    """The devices that are meant: places in `jax.devices()`, or devices themselves; None is JAX's first one.

    Raises:
      ConfigError: there is none, one that does not exist or is named twice, or they are not of one kind. `name` is what
        the error calls them.
    """
    if devices is None:
        return jax.devices()[:1]
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ConfigError(f"{name} is {devices!r}; expected a list of places in jax.devices(), such as [0, 1]")
    if not devices:
        raise ConfigError(f"{name} is empty; expected at least one place in jax.devices(), such as 0")
    there, chosen = jax.devices(), []
    for item in devices:
        if is_whole(item):
            if not 0 <= item < len(there):
                which = f"0 .. {len(there) - 1}" if len(there) > 1 else "0, as JAX has one device"
                raise ConfigError(f"{name} names device {item}; expected {which}")
            item = there[item]
        elif not isinstance(item, jax.Device):
            raise ConfigError(f"{name} has {item!r}; expected a place in jax.devices(), a whole number")
        if item in chosen:
            raise ConfigError(f"{name} names {item} twice; expected each device once")
        chosen.append(item)
    kinds = list(dict.fromkeys(device.device_kind for device in chosen))
    if len(kinds) > 1:
        raise ConfigError(
            f"{name} are {' and '.join(kinds)}; expected devices of one kind, as on others the same model may answer "
            f"differently"
        )
    return chosen
