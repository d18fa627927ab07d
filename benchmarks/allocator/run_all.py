"""Every allocator benchmark, each in a process of its own: under six minutes on a GPU, less where there is none."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ON_HOST = ("churn.py", "fragmentation.py")
ON_GPU = ("lending_latency.py", "compaction_time.py", "bandwidth.py", "replay_jitter.py", "record_iteration.py")


def main() -> int:
    """Run them; 1 if one failed, 2 if none can run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="only what needs no GPU, on the host driver")
    options = parser.parse_args()
    try:
        from backends.cuda import _native
    except ImportError:
        print("the C++ extension is not installed: HARLI_CUDA=1 pip install . or, without CUDA, HARLI_NATIVE=host")
        return 2
    on_gpu = _native.with_cuda and not options.host
    failed = []
    for script in (*(ON_GPU if on_gpu else ("lending_latency.py --host",)), *ON_HOST):
        name, *arguments = script.split()
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(name)), *arguments], check=False, timeout=240
        )
        print(f"{script}: rc {done.returncode}, {time.perf_counter() - begin:.1f} s", flush=True)
        failed += [script] if done.returncode else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
