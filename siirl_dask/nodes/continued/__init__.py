"""Rows that go on in later steps: where a step stops, and which groups it takes."""
