"""The reference backend: the definition of right, in plain torch, on any device."""

from m31_reference.session import ReferenceBackend

__all__ = ["ReferenceBackend"]
