"""Shipped for those who write engines, trainers or transports: conformance suites, tiny models, tiny tasks."""
