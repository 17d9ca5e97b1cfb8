"""A reward that runs a response's program against test cases, in a sandbox."""
