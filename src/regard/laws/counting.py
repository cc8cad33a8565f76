"""Specs of ours whose counts are compared with what is really there."""

from .target import Part


def counted_specs() -> tuple[Part, ...]:
    return ()
