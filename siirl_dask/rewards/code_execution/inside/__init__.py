"""The code that runs inside a sandbox: it confines its own process, then runs a program or a test
there.

It is started as a script without the packages above it, which would take most of a second to
import, and needs the standard library alone.
"""
