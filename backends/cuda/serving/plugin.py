"""Harli as an SGLang plugin (entry point group ``sglang.srt.plugins``): its KV cache lies in the unified pool.

An SGLang that an operator launches loads it by itself; `SGLANG_PLUGINS` chooses among several. Without a serving loop of
Harli nothing is ever lent, and SGLang works as before.
"""

from __future__ import annotations

import os

from backends.cuda.memory import extension
from backends.cuda.serving import decode_attention, sglang_version
from backends.cuda.serving.kv_pool import KvSettings, pool_class
from backends.cuda.serving.slot_allocator import allocator_class
from harli_core.errors import ConfigError

POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
ALLOCATOR = "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator"


def settings_from_environment() -> KvSettings:
    """``HARLI_KV_LENDING`` (alias, remap) and ``HARLI_KV_SCRUB`` (zero, poison)."""
    lending = os.environ.get("HARLI_KV_LENDING", "alias")
    scrub = os.environ.get("HARLI_KV_SCRUB", "zero")
    if lending not in ("alias", "remap") or scrub not in ("zero", "poison"):
        raise ConfigError(
            f"HARLI_KV_LENDING is {lending!r} (alias or remap), HARLI_KV_SCRUB is {scrub!r} (zero or poison)"
        )
    return KvSettings("remap" if lending == "remap" else "alias", "poison" if scrub == "poison" else "zero")


def load() -> None:
    """What SGLang calls; raises `BackendUnavailableError` where extension or version do not fit."""
    register(settings_from_environment())


def register(settings: KvSettings) -> None:
    """Replace SGLang's pool and allocator by ours, and how decode attention is launched; before its scheduler is made."""
    extension.require()
    sglang_version.require()
    from sglang.srt.mem_cache import kv_cache_configurator  # noqa: F401  (holds the names that are replaced)
    from sglang.srt.mem_cache.allocator import token
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    pool, allocator = MHATokenToKVPool, token.TokenToKVPoolAllocator
    pool = getattr(pool, "replaces", pool)
    allocator = getattr(allocator, "replaces", allocator)
    ours = pool_class(pool, settings)
    ours.replaces = pool
    ours_allocator = allocator_class(allocator)
    ours_allocator.replaces = allocator
    for target, replacement in ((POOL, ours), (ALLOCATOR, ours_allocator)):
        HookRegistry._hooks.pop(target, None)
        HookRegistry._patched.discard(target)
        HookRegistry.register(target, replacement, HookType.REPLACE)
    HookRegistry.apply_hooks()
    decode_attention.register(decode_attention.capability_here())
