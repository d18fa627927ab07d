"""``harli policy new NAME``: a policy that runs, and a test that holds it to the contract."""

from __future__ import annotations

import keyword
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from harli_core.errors import ConfigError
from policies import POLICIES

LONGEST_NAME = 100

TEMPLATES = files("harli_cli.templates")


def scaffold(name: str, folder: Path) -> tuple[Path, Path]:
    """Write ``NAME.py`` and ``test_NAME.py`` into ``folder``; raises `ConfigError` rather than overwrite a file."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or not name.isascii():
        raise ConfigError(f"policy name {name!r}: expected lower-case letters, digits and _, as in my_policy")
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"policy name {name[:20]!r}..: {len(name)} characters, expected {LONGEST_NAME} at most")
    if name in POLICIES:
        raise ConfigError(f"policy name {name!r} is a built-in policy; choose another one")
    known = name in sys.stdlib_module_names or (find_spec(name) is not None and not (folder / f"{name}.py").exists())
    if known:
        raise ConfigError(f"policy name {name!r}: Python has a module of that name already; choose another one")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    if not class_name.isidentifier():
        raise ConfigError(f"policy name {name!r}: expected a letter in it, as in my_policy")
    places = (folder / f"{name}.py", folder / f"test_{name}.py")
    for path in places:
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another name or folder")
    for path, template in zip(places, ("policy.txt", "test_policy.txt"), strict=True):
        text = (TEMPLATES / template).read_text("utf-8").replace("@NAME@", name).replace("@CLASS@", class_name)
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return places
