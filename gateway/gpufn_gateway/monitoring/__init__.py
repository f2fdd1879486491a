"""Alert rules and dashboards as data. `scripts/monitoring` writes the files in docs/monitoring from it."""
