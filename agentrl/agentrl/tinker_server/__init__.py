"""A server that speaks Tinker's protocol over the local client API."""

from agentrl.tinker_server.app import create_app

__all__ = ["create_app"]
