"""``python -m agentrl.runner``: the pool, started by ``start_pool``."""

from agentrl.runner.pool import main

main()
