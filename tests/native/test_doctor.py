"""The doctor says what is missing here and what to do, and never raises."""

from __future__ import annotations

import pytest

from backends.cuda import _native, doctor
from backends.cuda._native import HostDriver
from backends.cuda.doctor import Diagnosis, Finding, diagnose


def test_every_missing_thing_has_a_remedy() -> None:
    """Structured findings; without a GPU it is not ready and says why."""
    diagnosis = diagnose()
    names = [finding.name for finding in diagnosis.findings]
    assert len(names) == len(set(names))
    assert names[0] == "NVIDIA driver"
    extension = next(finding for finding in diagnosis.findings if finding.name == "C++ extension")
    assert extension.ok == _native.with_cuda
    if diagnosis.value("NVIDIA driver") is None:
        assert not diagnosis.ready
        assert "run on a machine with a GPU" in diagnosis.render()
    with pytest.raises(KeyError):
        diagnosis.value("weather")


def test_rendering() -> None:
    """One line a finding; a remedy follows its finding."""
    text = Diagnosis(
        (Finding("GPUs", 2), Finding("aliasing", None, "", "use remap"), Finding("memory", 80, "GiB"))
    ).render()
    assert text.splitlines() == [
        "ok       GPUs: 2",
        "MISSING  aliasing: not known",
        "         -> use remap",
        "ok       memory: 80 GiB",
        "not ready for --backend cuda; simulations (--backend sim) need none of this",
    ]


def test_aliasing_check_is_done_with_real_bytes() -> None:
    """The check passes on a driver that aliases, and leaves nothing behind."""
    driver = HostDriver(4096)
    assert doctor._aliases(driver)
    assert driver.use() == (0, 0, 0, 0)
