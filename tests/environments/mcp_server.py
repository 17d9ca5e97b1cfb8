"""A server of tools that speaks MCP over its standard input and output, or over HTTP on a port
that it is given.
"""

import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("numbers")


@server.tool()
def double(number: int) -> int:
    """Double a number."""
    if number < 0:
        raise ToolError(f"{number} is below 0")
    return 2 * number


@server.tool()
async def wait() -> str:
    """Wait for ever."""
    import asyncio

    await asyncio.Event().wait()
    return "never"


@server.tool()
def end() -> str:
    """End the server."""
    import os

    os._exit(3)


@server.tool()
async def hang() -> str:
    """Answer nobody any more."""
    import time

    time.sleep(1000)
    return "never"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    server.run()
