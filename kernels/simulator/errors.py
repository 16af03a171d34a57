"""Errors of the simulator's host side."""

from wanfp4.errors import Wanfp4Error


class HostError(Wanfp4Error, RuntimeError):
    """A launch cannot be caught, or asks of the machine what is not modelled."""
