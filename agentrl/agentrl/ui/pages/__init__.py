"""The pages, a module for each kind. A page is a function that returns a rendered template."""

from agentrl.ui.pages import (
    call,
    calls,
    evaluations,
    feedback,
    group,
    replay,
    rollout,
    rollouts,
    runs,
    sweeps,
    tokens,
)

_MODULES = (
    runs, rollouts, rollout, group, call, calls, tokens, replay, evaluations, feedback, sweeps,
)  # fmt: skip
PAGES = [module.router for module in _MODULES]
