"""The one error of configuration: always names the dotted path, the value and what was expected."""


class ConfigError(ValueError):
    """A configuration that cannot be built or does not validate; its text is meant for the user."""
