"""The pages, a module for each kind. A page is a function that returns a rendered template."""

from agentrl.ui.pages import (
    call,
    calls,
    compare,
    evaluations,
    feedback,
    rollout,
    rollouts,
    runs,
    served,
    sweeps,
)

PAGES = (
    runs.router,
    rollouts.router,
    rollout.router,
    call.router,
    calls.router,
    evaluations.router,
    compare.router,
    feedback.router,
    served.router,
    sweeps.router,
)
