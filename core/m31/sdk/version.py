"""The version of the contract between the core and its backends."""

from __future__ import annotations

#: A backend's manifest states the range that it was written for (`requires = ">=0.1,<1"`). Below 1.0 the contract is a
#: draft: a minor step may break it. It freezes at 1.0.
API_VERSION = "0.1"
