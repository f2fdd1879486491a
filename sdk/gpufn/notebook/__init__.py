"""Output of gpufn in a Jupyter notebook: progress of maps, and views as tables."""
