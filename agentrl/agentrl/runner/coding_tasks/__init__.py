"""Run coding agents on tasks with tests: a fresh copy, the command, the diff, the reward."""
