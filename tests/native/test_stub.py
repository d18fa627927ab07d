"""The checked-in stub names what the extension has, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import backends.cuda
from backends.cuda import _native


def public(names: object) -> set[str]:
    """Names without leading underscore."""
    return {name for name in dir(names) if not name.startswith("_")}


def test_stub_and_extension_agree() -> None:
    """Classes, their members, functions and constants are the same on both sides."""
    stubs = [Path(folder) / "_native.pyi" for folder in backends.cuda.__path__]  # an editable install has two folders
    tree = ast.parse(next(stub for stub in stubs if stub.exists()).read_text())
    typed_only = {"LatencyDict", "SpaceDict", "PoolDict", "Call"}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and node.name not in typed_only}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants = {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    if not _native.with_cuda:
        del classes["CudaDriver"], classes["CudaPartitions"]
    assert public(_native) == functions | constants | set(classes)
    for name, node in classes.items():
        stubbed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} - {"__init__"}
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        inherited = set().union(*(public(getattr(_native, base)) for base in bases))
        assert public(getattr(_native, name)) - inherited == stubbed, name
