"""Who gets room: the shares of new workers, and the workers that leave, park or move. Pure."""
