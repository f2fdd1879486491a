"""The web console: its files, its sessions, and the live data of its pages."""
