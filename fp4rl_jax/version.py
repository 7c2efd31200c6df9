"""The version of the project, in the one place that packaging and run manifests read."""

__version__ = "0.1.0"
