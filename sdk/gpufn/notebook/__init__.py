"""What gpufn shows in a Jupyter notebook: progress of maps, and views as tables."""
