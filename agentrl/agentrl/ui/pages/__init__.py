"""The pages, a module for each kind. A page is a function that returns a rendered template."""

from agentrl.ui.pages import (
    call,
    calls,
    compare,
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

PAGES = (
    runs.router,
    rollouts.router,
    rollout.router,
    group.router,
    call.router,
    calls.router,
    tokens.router,
    replay.router,
    evaluations.router,
    compare.router,
    feedback.router,
    sweeps.router,
)
