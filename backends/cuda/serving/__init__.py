"""Decoding on the unified pool: SGLang's scheduler in this process, step by step, with finetuning in between.

Modules import torch and SGLang where they are used; `sglang_version.require` says what is missing.
"""
