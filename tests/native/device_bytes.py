"""Reading and writing the memory of either driver; needs neither pytest nor torch."""

from __future__ import annotations

import ctypes

from backends.cuda._native import Driver

SIDE_STREAM = 0


class DeviceBytes:
    """Bytes at native addresses. Each call is ordered after what the default stream was given, and waits for itself."""

    def __init__(self, driver: Driver) -> None:
        """Use ``driver``'s copies."""
        self.driver = driver

    def read(self, address: int, count: int) -> bytes:
        """Return ``count`` bytes."""
        buffer = (ctypes.c_uint8 * count)()
        self.driver.copy(ctypes.addressof(buffer), address, count, SIDE_STREAM)
        self.wait(SIDE_STREAM)
        return bytes(buffer)

    def write(self, address: int, content: bytes) -> None:
        """Store ``content``."""
        buffer = (ctypes.c_uint8 * len(content)).from_buffer_copy(content)
        self.driver.copy(address, ctypes.addressof(buffer), len(content), SIDE_STREAM)
        self.wait(SIDE_STREAM)

    def wait(self, stream: int) -> None:
        """Spin until the stream is done (tests only; nothing in the product does this)."""
        event = self.driver.create_event()
        self.driver.record(event, stream)
        while not self.driver.query(event):
            pass
        self.driver.destroy(event)
