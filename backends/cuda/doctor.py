"""What this machine can do for the CUDA backend, and for each missing thing what to do about it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from backends.cuda.memory import extension
from backends.cuda.requirements import INSTALL, PACKAGES
from backends.cuda.serving import sglang_version
from harli_core.errors import HarliError

UNREADY = "not ready for --backend cuda; simulations (--backend sim) need none of this"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``value`` is `None` where it could not be found out; ``remedy`` is what to do then."""

    name: str
    value: str | int | float | bool | None
    unit: str = ""
    remedy: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return self.remedy is None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in the order in which one builds on the other."""

    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        """Whether ``--backend cuda`` can run on this machine."""
        return all(finding.ok for finding in self.findings)

    def value(self, name: str) -> str | int | float | bool | None:
        """The value of a finding; raises `KeyError` for a name that is not among them."""
        for finding in self.findings:
            if finding.name == name:
                return finding.value
        raise KeyError(name)

    def render(self) -> str:
        """One line a finding, remedies below theirs."""
        lines = []
        for finding in self.findings:
            shown = f"{finding.value}{' ' * bool(finding.unit)}{finding.unit}"
            if finding.value is None or finding.value is False:
                shown = "not known" if finding.value is None else "none"
            lines.append(f"{'ok     ' if finding.ok else 'MISSING'}  {finding.name}: {shown}")
            if finding.remedy is not None:
                lines.append(f"         -> {finding.remedy}")
        lines.append("ready for --backend cuda" if self.ready else UNREADY)
        return "\n".join(lines)


def diagnose(device: int = 0) -> Diagnosis:
    """Look at this machine. Allocates a block or two on the GPU for a moment; raises nothing."""
    findings = [_driver_library(), *_packages(), _extension()]
    if findings[0].ok:
        findings += _driver_version()
        if findings[-1].ok and findings[-1].value is not None:
            findings += _memory(device)
            findings += _torch_side(device)
    return Diagnosis(tuple(findings))


def _driver_library() -> Finding:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding(
            "NVIDIA driver", None, "", "install the NVIDIA driver (libcuda.so.1), or run on a machine with a GPU"
        )
    return Finding("NVIDIA driver", "libcuda.so.1")


def _packages() -> list[Finding]:
    """Those of the extra ``cuda``, by version."""
    found = []
    for package in PACKAGES:
        here = package.here()
        fault = None if here and not package.too_old() else f"{package.wanted} is needed: {INSTALL}"
        found.append(Finding(f"package {package.name}", here and (package.installed() or True), "", fault))
    version = sglang_version.installed()
    return [*found, Finding("package sglang", version or False, "", sglang_version.fault(version))]


def _extension() -> Finding:
    lacking = extension.missing()
    if lacking is not None:
        return Finding("C++ extension", None, "", extension.HOW_TO_BUILD)
    from backends.cuda import _native

    remedy = (
        None if _native.with_cuda else "it has the host driver only: HARLI_CUDA=1 pip install . (needs CUDA headers)"
    )
    return Finding("C++ extension", "host and cuda drivers" if _native.with_cuda else "host driver", "", remedy)


def _driver_version() -> list[Finding]:
    cuda = ctypes.CDLL("libcuda.so.1")
    version, devices = ctypes.c_int(0), ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(devices)) != 0 or devices.value == 0:
        return [Finding("GPUs", None, "", "the driver finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES")]
    cuda.cuDriverGetVersion(ctypes.byref(version))
    major, minor = version.value // 1000, version.value % 1000 // 10
    old = None if version.value >= 12040 else "green contexts need a driver for CUDA 12.4 or newer (550)"
    return [Finding("CUDA version of the driver", f"{major}.{minor}", "", old), Finding("GPUs", devices.value)]


def _memory(device: int) -> list[Finding]:
    if extension.missing() is not None:
        return []
    from backends.cuda import _native

    if not _native.with_cuda:
        return []
    try:
        driver = _native.CudaDriver(device)
    except HarliError as error:
        return [Finding("virtual memory management", None, "", str(error))]
    found = [Finding("virtual memory management", True), Finding("mapping granularity", driver.granularity, "bytes")]
    if (2 * 2**20) % driver.granularity:
        found.append(
            Finding(
                "2 MiB blocks", False, "", "blocks of 2 MiB cannot be mapped here: the pool does not support this GPU"
            )
        )
    try:
        aliasing = _aliases(driver)
    except HarliError as error:
        return [*found, Finding("aliasing", None, "", f"could not be tried: {error}")]
    remedy = None if aliasing else "lend with remap: one block cannot be seen at two addresses here"
    return [*found, Finding("aliasing", aliasing, "", remedy)]


def _aliases(driver: Any) -> bool:
    """Map one block twice, write through one address and read through the other."""
    size = driver.granularity
    at = driver.reserve(2 * size)
    handle = driver.create(size)
    try:
        for address in (at, at + size):
            driver.map(address, size, handle)
        driver.set_access(at, 2 * size)
        seen = ctypes.c_uint32(0)
        driver.fill(at, 0xA11A, size)
        driver.copy(ctypes.addressof(seen), at + size, 4)
        event = driver.create_event()
        driver.record(event, 0)
        while not driver.query(event):
            pass
        driver.destroy(event)
        for address in (at, at + size):
            driver.unmap(address, size)
    finally:
        driver.release(handle)
    driver.free(at, 2 * size)
    return bool(seen.value == 0xA11AA11A)


def _torch_side(device: int) -> list[Finding]:
    found: list[Finding] = []
    if find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            remedy = f"torch {torch.__version__} finds no GPU: install a CUDA build of torch that the driver supports"
            return [Finding("torch on the GPU", False, "", remedy)]
        properties = torch.cuda.get_device_properties(device)
        found += [
            Finding("GPU", properties.name),
            Finding("GPU memory", round(properties.total_memory / 2**30, 1), "GiB"),
            Finding("streaming multiprocessors", properties.multi_processor_count),
            *(_pinned_bandwidth(torch, device, way) for way in ("host to GPU", "GPU to host")),
        ]
    if find_spec("cuda") is not None:
        found += _partitions(device)
    return found


def _pinned_bandwidth(torch: Any, device: int, way: str) -> Finding:
    name = f"pinned copies {way}"
    try:
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        gpu = torch.empty(2**28, dtype=torch.uint8, device=f"cuda:{device}")
        to, source = (gpu, host) if way == "host to GPU" else (host, gpu)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        to.copy_(source, non_blocking=True)
        begin.record()
        for _ in range(4):
            to.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
    except RuntimeError as error:
        return Finding(name, None, "", f"pinned memory cannot be had: {str(error).splitlines()[0]}; see ulimit -l")
    gb_per_s = 4 * 2**28 / begin.elapsed_time(end) / 1e6
    remedy = None if gb_per_s > 5 else "window swaps would be slow: is the GPU in a slot with all its PCIe lanes?"
    return Finding(name, round(gb_per_s, 1), "GB/s", remedy)


def _partitions(device: int) -> list[Finding]:
    """The smallest SM partition and the step between sizes, from splitting the SM resource once (nothing is created)."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return [Finding("SM partitions", None, "", "cuda-python is too old: pip install 'cuda-python>=13'")]
    try:
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        error, whole = driver.cuDeviceGetDevResource(device, kind)
        if int(error) != 0:
            return [
                Finding(
                    "SM partitions", None, "", f"the driver has no green contexts ({error}): 550 or newer is needed"
                )
            ]
        error, groups, _count, rest = driver.cuDevSmResourceSplitByCount(1, whole, 0, 1)
        if int(error) != 0:
            return [
                Finding(
                    "SM partitions", None, "", f"the SMs cannot be split ({error}): stream priorities are used instead"
                )
            ]
        return [
            Finding("SMs that can be split", int(whole.sm.smCount)),
            Finding("smallest SM partition", int(groups[0].sm.smCount)),
            Finding("SMs left beside the smallest partition", int(rest.sm.smCount)),
        ]
    except (AttributeError, TypeError, ValueError) as error:
        return [Finding("SM partitions", None, "", f"cuda-python does not offer green contexts as expected: {error}")]
