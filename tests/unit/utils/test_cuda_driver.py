"""How a call of the driver that fails is told. The driver is a fake; tests/gpu has the real one."""

import ctypes
from typing import Any

import pytest

from tandem.utils import cuda_driver
from tandem.utils.cuda_driver import DeviceBytes, DriverError, call_driver


class FakeDriver:
    """Answers each call with a status, and has one text for errors."""

    def __init__(self, status: int, text: bytes | None) -> None:
        self.status, self.text = status, text
        self.calls: list[tuple[Any, ...]] = []

    def cuMemRelease(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return self.status

    def cuGetErrorString(self, status: ctypes.c_int, text: Any) -> int:
        assert status.value == self.status
        text._obj.value = self.text
        return 0


@pytest.mark.parametrize(
    ("text", "reason"), [(b"out of memory", "error 2, out of memory"), (None, "error 2, unknown error")]
)
def test_a_refused_call_names_the_function_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, text: bytes | None, reason: str
) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: FakeDriver(2, text))
    with pytest.raises(DriverError, match=f"^cuMemRelease of the CUDA driver: {reason}$"):
        call_driver("cuMemRelease", 7)


def test_a_call_that_succeeds_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(0, None)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    call_driver("cuMemRelease", 7)
    assert driver.calls == [(7,)]


def test_bytes_of_a_device_say_where_they_lie() -> None:
    told = DeviceBytes(4096, 12).__cuda_array_interface__
    assert (told["data"], told["shape"], told["typestr"]) == ((4096, False), (12,), "|u1")
