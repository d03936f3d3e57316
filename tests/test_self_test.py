"""The check that a device multiplies right, with kernels that JAX interprets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import q8_partial_sums
from vramjax.decode import self_test
from vramjax.decode.self_test import check_kernels
from vramjax.errors import VramjaxError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Has kernels interpreted, as if this device had them; records the backends of the products."""
    used: list[str] = []

    def recorded(*args: Any, backend: Any, **settings: Any) -> jax.Array:
        used.append(backend)
        return q8_partial_sums(*args, backend=backend, **settings)

    monkeypatch.setattr("vramjax.decode.self_test.default_backend", lambda device: "interpret")
    monkeypatch.setattr("vramjax.decode.self_test.q8_partial_sums", recorded)
    check_kernels.cache_clear()
    yield used
    check_kernels.cache_clear()


def test_a_right_product_passes_and_is_checked_once(calls: list[str]) -> None:
    device = jax.devices()[0]
    check_kernels(device)
    check_kernels(device)
    assert calls == ["interpret"] * 3  # few rows in both ways, and many


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda y: y * 1.001, "scale"),
        (lambda y: y.at[:, 3, 70].set(0.0), "one value"),
        (lambda y: y * jnp.nan, "NaN"),
        (jnp.zeros_like, "nothing"),
    ],
)
@pytest.mark.usefixtures("calls")
def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: object, kind: str) -> None:
    right = q8_partial_sums
    monkeypatch.setattr("vramjax.decode.self_test.q8_partial_sums", lambda *args, **kw: wrong(right(*args, **kw)))  # pyright: ignore
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(VramjaxError, match=f"relative error of .* update jax \\({jax.__version__}"):
            check_kernels(jax.devices()[0])


def test_every_form_of_the_kernel_is_checked(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """One that alone is wrong is found."""
    recorded = self_test.q8_partial_sums
    for wrong in (0, 1, 2):
        calls.clear()
        monkeypatch.setattr(
            self_test,
            "q8_partial_sums",
            lambda *args, wrong=wrong, **kw: recorded(*args, **kw) * (len(calls) - 1 != wrong),
        )
        with pytest.raises(VramjaxError):
            check_kernels(jax.devices()[0])
        assert len(calls) == wrong + 1


def test_a_cpu_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramjax.decode.self_test.q8_partial_sums", None)
    check_kernels.cache_clear()
    check_kernels(jax.devices("cpu")[0])
