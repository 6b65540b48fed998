"""Run the command line: ``agentrl``, or ``python -m agentrl``."""

from agentrl.interrupts import handle_signals


def main() -> None:
    handle_signals()  # before the imports, which take a second
    from agentrl.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
