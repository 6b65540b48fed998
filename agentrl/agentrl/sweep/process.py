"""A trial's process: ``agentrl train``, which ends when its sweep is gone."""

from agentrl.__main__ import main
from agentrl.supervisor import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
