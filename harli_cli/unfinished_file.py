"""A text file that is written as a run goes, and takes its name when the run is complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from harli_core.errors import HarliError
from traces.whole_file import replaceable, unused_beside


class UnfinishedFile:
    """Text beside ``path`` (or what it links to) under another name, until `close` says that it is complete."""

    def __init__(self, path: Path, fault: Callable[[OSError], HarliError]) -> None:
        """Open it; ``fault`` makes the error to raise from what the system says."""
        self._fault = fault
        try:
            self._path = replaceable(path)
            self._partial = unused_beside(self._path)
            self._file = self._partial.open("x", encoding="utf-8", newline="\n")
        except OSError as error:
            raise fault(error) from None

    def write(self, text: str) -> None:
        """Append ``text``; raises what ``fault`` makes when the disk does not take it."""
        try:
            self._file.write(text)
        except OSError as error:
            raise self._fault(error) from None

    def close(self, ending: str, *, complete: bool) -> None:
        """Append ``ending`` and name the complete file, or remove the partial one."""
        try:
            with self._file:
                self._file.write(ending)
                self._file.flush()
                os.fsync(self._file.fileno())
            if complete:
                self._partial.replace(self._path)
        except OSError as error:
            if complete:
                raise self._fault(error) from None
        finally:
            self._partial.unlink(missing_ok=True)
