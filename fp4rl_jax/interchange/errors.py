"""The one error of this folder."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read exactly; the message names the file and the tensor or field."""
