"""The pages, a module for each kind. A page is a function that returns a rendered template."""

from agentrl.ui.pages import call, calls, evaluations, feedback, rollout, rollouts, runs, sweeps

_MODULES = (runs, rollouts, rollout, call, calls, evaluations, feedback, sweeps)
PAGES = [module.router for module in _MODULES]
