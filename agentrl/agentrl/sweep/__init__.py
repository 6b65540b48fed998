"""Sweeps: Optuna chooses values of settings, and every trial is an ordinary training run.

``runs/SWEEP`` holds Optuna's study, each trial's settings and output, and what the page and the
pictures are made of; the runs are ``runs/SWEEP-000`` and so on. All of it survives ``kill -9``: the
study knows which values were chosen, and a run's folder how far it got.
"""
