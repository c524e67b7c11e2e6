"""What this package refuses, besides what m31.errors already names (BackendRefused, OpRefused)."""

from __future__ import annotations

from m31.errors import BackendError


class CodeRejected(BackendError):
    """A kernel compiled to code that lacks a wanted instruction, has an unwanted one, or needs more than the device."""


class CaptureMismatch(BackendError):
    """A launch would differ from the recorded one in more than the contents of its buffers, or is not a launch."""
