"""Run the command line: ``python -m agentrl``."""

from agentrl.cli.main import main

main()
