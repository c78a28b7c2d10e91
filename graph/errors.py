"""Errors of the graph package, below the project's tree in `traces.errors`."""

from __future__ import annotations

from traces.errors import LLMemError


class CaptureError(LLMemError):
    """A model's step cannot be captured: what was met, where, and what to change."""


class UnsupportedTorch(CaptureError):  # noqa: N818 - a state of the installation, told as one
    """The installed PyTorch does not behave as the capture needs: which check failed, with which release."""
