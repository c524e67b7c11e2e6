"""The version of the contract between the core and its backends."""

from __future__ import annotations

#: A backend's manifest states the range that it was written for (`requires = ">=1.0,<2"`). An addition raises the minor
#: number, a change that can break a backend the major one; a snapshot test holds every public name and signature.
API_VERSION = "1.1"
