"""What is wrong with a command line or its environment."""


class ConfigError(ValueError):
    """A flag's value cannot be served; the message names the flag, the value and the limit."""
