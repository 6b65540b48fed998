"""Where a run's metrics and samples go: its folder, its store, and trackers."""
