"""A trial's process: ``agentrl train``, which ends when its sweep is gone."""

import runpy

from agentrl.supervisor import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("agentrl", run_name="__main__", alter_sys=True)
