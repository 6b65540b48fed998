"""``python -m agentrl.runner``: a pool and its store; stdin has the configuration, as a line."""

from agentrl.runner.store_process import main

if __name__ == "__main__":
    main()
