"""The decision core of Harli: no I/O, no clock, no GPU. See `harli_core.loop` for where it starts."""
