"""`harli doctor`: what this machine lacks for the CUDA backend, for people and for programs."""

from __future__ import annotations

import json

import pytest

from backends.cuda.doctor import diagnose
from harli_cli.main import main


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """The same findings in both forms; the exit code says whether anything has to be done."""
    monkeypatch.setattr("sys.argv", ["harli", "doctor", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    diagnosis = diagnose()
    assert ended.value.code == (0 if diagnosis.ready else 1)
    said = capsys.readouterr().out
    if options:
        assert [finding["name"] for finding in json.loads(said)["findings"]] == [f.name for f in diagnosis.findings]
    else:
        assert all(finding.remedy in said for finding in diagnosis.findings if finding.remedy is not None)
