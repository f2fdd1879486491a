"""Room for workers: the shares of new ones, and the workers that leave, park or move. Pure."""
