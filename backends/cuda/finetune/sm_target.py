"""How many SMs a stream has, and telling cuBLAS so: left alone it plans its kernels for the whole chip."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harli_core.errors import DriverCallError


def stream_sms(stream: Any) -> int | None:
    """SMs of the partition that a `torch.cuda.Stream` launches on; `None` where the driver cannot say.

    Older drivers cannot be asked about a stream, only about its green context.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    handle, kind = driver.CUstream(stream.cuda_stream), driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    for ask in (_of_stream, _of_green_context):
        try:
            fault, resource = ask(driver, handle, kind)
        except (AttributeError, RuntimeError):  # the binding, or the driver, does not have the call
            continue
        if int(fault) == 0 and resource is not None:
            return int(resource.sm.smCount)
    return None


def _of_stream(driver: Any, handle: Any, kind: Any) -> tuple[int, Any]:
    fault, resource = driver.cuStreamGetDevResource(handle, kind)
    return int(fault), resource


def _of_green_context(driver: Any, handle: Any, kind: Any) -> tuple[int, Any]:
    fault, context = driver.cuStreamGetGreenCtx(handle)
    if int(fault) != 0 or int(context) == 0:
        return int(fault), None
    fault, resource = driver.cuGreenCtxGetDevResource(context, kind)
    return int(fault), resource


class SmCountTarget:
    """``cublasSetSmCountTarget`` on torch's own handle of the current thread."""

    def __init__(self) -> None:
        """Find the cuBLAS that torch has loaded; `available` says whether it was found."""
        self._library = _loaded_cublas()
        self.available = self._library is not None

    @contextmanager
    def set_to(self, sms: int | None) -> Iterator[None]:
        """Let cuBLAS plan for ``sms`` SMs inside; `None`: for the whole chip, as ever. Raises `DriverCallError`."""
        if sms is None or self._library is None:
            yield
            return
        import torch

        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        self._call(handle, sms)
        try:
            yield
        finally:
            self._call(handle, 0)

    def _call(self, handle: Any, sms: int) -> None:
        assert self._library is not None
        fault = self._library.cublasSetSmCountTarget(handle, ctypes.c_int(sms))
        if fault:
            raise DriverCallError(f"cublasSetSmCountTarget({sms}) failed with status {fault}")


def _loaded_cublas() -> Any:
    """The library by the path under which this process has it, so that it is the one whose handles torch uses."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text("utf-8", "replace").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcublas.so"):
            return ctypes.CDLL(path)
    return None
