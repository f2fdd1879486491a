"""The gateway's HTTP interface from Python."""
