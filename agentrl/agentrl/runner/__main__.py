"""``python -m agentrl.runner``: the pool, with its configuration on the first line of stdin."""

from agentrl.runner.pool import main

if __name__ == "__main__":
    main()
