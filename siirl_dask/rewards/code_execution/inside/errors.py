"""Errors of a test's process, beside what the test raises."""

from __future__ import annotations


class UnusableTestError(BaseException):
    """A test cannot be run apart from the program. It is no Exception, so that a test does not
    catch it.
    """
