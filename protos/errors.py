"""What can be wrong with a message."""


class WireError(ValueError):
    """A message that no peer of this version sends."""
