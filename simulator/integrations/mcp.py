"""`mcp`: serve AI assistants by the Model Context Protocol."""

from __future__ import annotations

import click

from traces.errors import LLMemError


class MissingSDKError(LLMemError):
    """The protocol's SDK is not installed."""


@click.command("mcp")
def command() -> int:
    """Serve estimate, record, fit, explain and compare to an AI assistant, on standard input and output.

    An assistant starts it by itself: name the command `llmem mcp` in its list of servers.
    """
    try:
        from simulator.integrations.assistants import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mcp":
            raise
        raise MissingSDKError("the SDK of the protocol is not installed: pip install 'vramsim[mcp]'") from None
    server().run()
    return 0
