"""Support for the processes of the platform: settings, signals, watchdog, sockets and limits."""
