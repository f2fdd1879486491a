"""Workers with `network="egress"`: the internet, but neither this node nor a private network. `rules` and `resolver`
are pure; `namespace` and `availability` talk to the kernel."""
