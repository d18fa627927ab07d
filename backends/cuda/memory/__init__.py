"""The unified allocator's bytes: provider, views, torch bridge, reclaim and compaction over the C++ extension.

Every module here but `extension` needs the extension; call `extension.require` first where it may be missing.
"""
